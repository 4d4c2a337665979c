"""The edge as a process: hostile clients, control clients, its end and its successor."""

import asyncio
import json
import os
import resource

import httpx
import pytest
from tests.integration.edge import rig
from tests.integration.edge.rig import ID, PORT, head, read_chunk, read_head

pytestmark = pytest.mark.usefixtures("guest")
BY_HOST = {"Host": f"{PORT}-{ID}.example.org"}


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n", 431),
    ],
)
async def test_bad_requests_are_refused(edge, request_bytes, status):
    reader, writer = await edge.connect()
    writer.write(request_bytes)
    assert (await read_head(reader))[0] == status
    writer.close()


async def test_content_length_beside_chunked_smuggles_nothing(edge, http):
    reader, writer = await edge.connect()
    smuggled = head("/echo")
    body = b"0\r\n\r\n" + smuggled
    lines = ("Transfer-Encoding: chunked", f"Content-Length: {len(body)}", "Connection: close")
    writer.write(head("/seen", *lines, method="POST") + body)
    status, headers = await read_head(reader)
    if status == 200:
        seen = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert seen["body"] == 0
        assert "content-length" not in seen["headers"]
    assert await reader.read() == b""  # one answer only
    writer.close()
    counted = (await http.get("/counts", headers=BY_HOST)).json()
    assert counted["requests"] <= 2


async def test_a_head_that_trickles_in_is_not_waited_for(edge):
    reader, writer = await edge.connect()
    writer.write(b"GET / HTTP/1.1\r\n")

    async def trickle():
        while True:
            writer.write(b"X")
            await asyncio.sleep(0.5)

    slow = asyncio.ensure_future(trickle())
    try:
        async with asyncio.timeout(60):
            assert await reader.read() == b""
    except ConnectionResetError:
        pass
    finally:
        slow.cancel()
        writer.close()


async def test_control_clients_come_and_go(edge, http, slot):
    await edge.control.close()
    assert (await http.get("/seen", headers=BY_HOST)).status_code == 200
    reader, writer = await asyncio.open_unix_connection(edge.folder / "control.sock")
    writer.write(b'nonsense\n\n{"id":7,"op":"what"}\n{"id":8,"op":"drop","args":{"id":"short"}}\n')
    codes = [json.loads(await reader.readline())["error"]["code"] for _ in range(3)]
    assert codes == ["bad_request", "unknown_op", "bad_request"]
    writer.write(b'{"id":9,"op":"hel')
    writer.close()
    hello = await edge.control.hello()
    assert (hello.protocol, hello.pid) == (1, edge.child.pid)


async def test_the_control_socket_is_private(edge):
    assert (edge.folder / "control.sock").stat().st_mode & 0o777 == 0o600


async def test_descriptors_are_not_left_behind(edge, http, slot):
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{edge.child.pid}/fd"))

    before = descriptors()
    for generation in range(2, 60):
        await edge.control.put(slot.route(generation=generation))
        assert (await http.get("/seen", headers=BY_HOST)).status_code == 200
    await edge.control.drop(ID)
    await http.aclose()
    async with asyncio.timeout(10):
        while descriptors() > before:
            await asyncio.sleep(0.01)


async def test_it_raises_its_limit_of_descriptors(edge):
    soft, hard = resource.prlimit(edge.child.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


async def test_a_second_edge_does_not_take_the_place_of_a_living_one(edge):
    async with rig.process(*rig.argv(edge.folder, port=edge.port)) as second:
        assert await second.wait() != 0
        assert await second.stdout.read() == b""
    assert (await edge.control.hello()).pid == edge.child.pid


async def test_the_socket_of_a_dead_one_is_replaced(edge, folder):
    edge.child.kill()
    await edge.child.wait()
    async with rig.edge(folder) as next_one:
        assert (await edge.control.hello()).pid == next_one.child.pid


async def test_sigterm_lets_requests_finish(edge):
    reader, writer = await edge.connect()
    writer.write(head("/echo", "Transfer-Encoding: chunked", method="POST") + b"1\r\nx\r\n")
    await read_head(reader)
    assert await read_chunk(reader) == b"x"
    idle = await edge.connect()
    edge.terminate()
    async with asyncio.timeout(10):
        while (edge.folder / "control.sock").exists():
            await asyncio.sleep(0.01)
    writer.write(b"1\r\ny\r\n0\r\n\r\n")
    assert await read_chunk(reader) == b"y"
    assert await read_chunk(reader) == b""
    assert await edge.child.wait() == 0
    for stream in (writer, idle[1]):
        stream.close()


async def test_the_drain_ends_at_its_deadline_and_a_successor_serves_meanwhile(folder, slot):
    async with rig.edge(folder, drain=1) as first:
        await first.control.sync([slot.route()], [])
        reader, writer = await first.connect()
        writer.write(head("/events"))
        await read_head(reader)
        await first.control.drain()
        while (folder / "control.sock").exists():
            await asyncio.sleep(0.01)
        async with rig.edge(folder, port=first.port) as second:
            await second.control.sync([slot.route()], [])
            async with httpx.AsyncClient(base_url=second.url) as http:
                assert (await http.get("/seen", headers=BY_HOST)).status_code == 200
            assert await first.child.wait() == 0
            assert (folder / "control.sock").exists()
        writer.close()
