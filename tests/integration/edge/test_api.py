"""What is for no sandbox goes to the API server, which may be away for a moment."""

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest
from tests.integration.edge import rig
from tests.integration.edge.guest import converse


@contextlib.asynccontextmanager
async def api_server(path: Path):
    """The same behaviours as the guest's server, on the unix socket; it ends as a process does."""
    open_now = set()

    async def until_closed(reader, writer):
        open_now.add(writer)
        await converse(reader, writer)
        open_now.remove(writer)

    server = await asyncio.start_unix_server(until_closed, path)
    try:
        yield
    finally:
        server.close()
        path.unlink()
        for writer in open_now:
            writer.transport.abort()


@pytest.fixture
async def patient(folder, slot):
    async with rig.edge(folder, api_wait=30) as running:
        await running.control.sync([slot.route()], [])
        yield running


async def test_all_else_is_for_the_api(edge, http):
    async with api_server(edge.api):
        seen = (await http.get("/seen?x=1")).json()
        assert seen["headers"]["host"] == http.base_url.netloc.decode()
        signed = (await http.get("/seen", params={"path": "a", "signature": "v1_x"})).json()
        assert "signature=v1_x" in signed["raw"]
        body = b"x" * 3_000_000
        assert (await http.post("/echo", content=body)).content == body


async def test_one_that_stays_away(http):
    reply = await http.post("/v2/sandboxes", json={})
    assert (reply.status_code, reply.json()["code"]) == (503, 503)
    assert reply.headers["retry-after"] == "1"
    assert reply.headers["should-retry"] == "true"


async def test_requests_wait_for_a_restart_and_none_is_lost(patient):
    async with httpx.AsyncClient(base_url=patient.url, timeout=30) as http:
        async with api_server(patient.api):
            assert (await http.get("/seen")).status_code == 200
        waiting = [asyncio.ensure_future(http.post("/echo", content=b"kept")) for _ in range(50)]
        async with asyncio.timeout(10):
            while (await patient.control.stats()).api.active < 50:
                await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        async with api_server(patient.api):
            replies = await asyncio.gather(*waiting)
    assert {(r.status_code, r.content) for r in replies} == {(200, b"kept")}


async def test_one_that_breaks_off_is_not_retried_blindly(edge, http):
    requests = 0

    async def hang_up(reader, writer):
        nonlocal requests
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        writer.close()

    server = await asyncio.start_unix_server(hang_up, edge.api)
    reply = await http.post("/v2/sandboxes", content=b"{}")
    server.close()
    assert (reply.status_code, reply.json()["code"]) == (502, 502)
    assert reply.headers["should-retry"] == "false"
    assert requests == 1


async def test_a_restart_of_the_api_cuts_no_stream_to_a_guest(edge, guest):
    reader, writer = await edge.connect()
    async with api_server(edge.api):
        writer.write(rig.head("/echo", "Transfer-Encoding: chunked", method="POST"))
        writer.write(b"1\r\nx\r\n")
        await rig.read_head(reader)
        assert await rig.read_chunk(reader) == b"x"
    await edge.control.close()
    writer.write(b"1\r\ny\r\n")
    assert await rig.read_chunk(reader) == b"y"
    writer.close()
