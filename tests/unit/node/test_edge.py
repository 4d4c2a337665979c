"""The control client against a scripted server: framing, errors, reconnection."""

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import InfraError
from agentenv.node.edge import EdgeClient, Hello, Resolver, Route, Traffic, Unopened, edge_argv

ROUTE = Route("abcd0123456789efghij", 1, "/run/netns/x", "10.233.0.2")


@contextlib.asynccontextmanager
async def edge(path: Path, *replies):
    """Answers the n-th request with ``replies[n]``; None hangs up. Yields the requests seen."""
    seen, script = [], list(replies)

    async def converse(reader, writer):
        try:
            while line := await reader.readline():
                request = json.loads(line)
                seen.append(request)
                reply = script.pop(0)
                if reply is None:
                    return
                writer.write(json.dumps({"id": request["id"]} | reply).encode() + b"\n")
        finally:
            writer.close()

    server = await asyncio.start_unix_server(converse, path)
    try:
        yield seen
    finally:
        server.close()
        path.unlink()


@pytest.fixture
async def client(tmp_path):
    client = EdgeClient(tmp_path / "ctl", timeout=5)
    yield client
    await client.close()


async def test_operations_as_they_go_over_the_wire(client, tmp_path):
    resolver = Resolver("s1", "/run/netns/x", "10.233.0.1:53", ("192.0.2.1:53",))
    async with edge(tmp_path / "ctl", *[{"ok": {"dropped": True}}] * 4) as seen:
        await client.put(ROUTE)
        assert await client.drop(ROUTE.id)
        await client.dns_up(resolver)
        assert await client.dns_down("s1")
    assert [(s["op"], s["args"]) for s in seen] == [
        (
            "put",
            {
                "route": {
                    "id": ROUTE.id,
                    "generation": 1,
                    "netns": "/run/netns/x",
                    "address": "10.233.0.2",
                    "public": True,
                    "traffic_token": None,
                    "mask_host": None,
                    "access_token": None,
                    "asleep": False,
                    "wakes": False,
                }
            },
        ),
        ("drop", {"id": ROUTE.id}),
        (
            "dns_up",
            {
                "slot": "s1",
                "netns": "/run/netns/x",
                "listen": "10.233.0.1:53",
                "upstreams": ["192.0.2.1:53"],
            },
        ),
        ("dns_down", {"slot": "s1"}),
    ]
    assert len({s["id"] for s in seen}) == 4


async def test_answers_are_typed(client, tmp_path):
    figures = {"requests": 3, "active": 1, "bytes_in": 4, "bytes_out": 5, "last_activity": 6}
    totals = {"api": figures, "connections": 7, "dns_queries": 8, "sandboxes": 1}
    failed = {
        "failed_routes": [{"id": ROUTE.id, "message": "gone"}],
        "failed_dns": [{"slot": "s", "message": "taken"}],
    }
    replies = (
        {"ok": {"protocol": 1, "pid": 2, "version": "0.1.0"}},
        {"ok": {"sandboxes": {ROUTE.id: figures}, "totals": totals}},
        {"ok": failed},
    )
    async with edge(tmp_path / "ctl", *replies):
        assert await client.hello() == Hello(1, 2, "0.1.0")
        stats = await client.stats()
        assert stats.sandboxes == {ROUTE.id: Traffic(3, 1, 4, 5, 6)}
        assert (stats.connections, stats.dns_queries) == (7, 8)
        unopened = await client.sync([ROUTE], [])
        assert unopened == (Unopened(ROUTE.id, "gone"), Unopened("s", "taken"))


async def test_news_of_who_is_to_be_woken(client, tmp_path):
    replies = {"ok": {"version": 7, "ids": [ROUTE.id]}}, {"ok": {"told": True}}
    async with edge(tmp_path / "ctl", *replies) as seen:
        assert await client.wakes(5, 30.0) == (7, [ROUTE.id])
        assert await client.wake_failed(ROUTE.id, "no room")
    assert [(s["op"], s["args"]) for s in seen] == [
        ("wakes", {"after": 5, "timeout": 30.0}),
        ("wake_failed", {"id": ROUTE.id, "message": "no room"}),
    ]


async def test_a_refusal_keeps_its_code_and_the_connection(client, tmp_path):
    refusal = {"error": {"code": "netns_unavailable", "message": "no such file"}}
    async with edge(tmp_path / "ctl", refusal, {"ok": {}}) as seen:
        with pytest.raises(InfraError, match="no such file") as caught:
            await client.put(ROUTE)
        assert caught.value.code == "netns_unavailable"
        await client.put(ROUTE)
        assert len(seen) == 2


async def test_nobody_there(client):
    with pytest.raises(InfraError) as caught:
        await client.hello()
    assert caught.value.code == "edge_down"


async def test_a_restarted_edge_is_asked_again(client, tmp_path):
    async with edge(tmp_path / "ctl", {"ok": {}}, None, {"ok": {}}) as seen:
        await client.put(ROUTE)
        await client.put(ROUTE)
    assert [s["op"] for s in seen] == ["put"] * 3


async def test_one_that_hangs_up_on_a_new_connection_is_down(client, tmp_path):
    async with edge(tmp_path / "ctl", None):
        with pytest.raises(InfraError) as caught:
            await client.hello()
    assert caught.value.code == "edge_down"


async def test_a_cancelled_call_does_not_leave_its_reply_to_the_next(tmp_path):
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def converse(reader, writer):
        while line := await reader.readline():
            request = json.loads(line)
            if request["op"] == "drop":
                arrived.set()
                await go_on.wait()
            ok = {"dropped": True, "protocol": 1, "pid": 1, "version": "x"}
            keep = ok if request["op"] == "drop" else {k: ok[k] for k in list(ok)[1:]}
            writer.write(json.dumps({"id": request["id"], "ok": keep}).encode() + b"\n")
        writer.close()

    server = await asyncio.start_unix_server(converse, tmp_path / "ctl")
    client = EdgeClient(tmp_path / "ctl", timeout=5)
    call = asyncio.ensure_future(client.drop(ROUTE.id))
    await arrived.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go_on.set()
    assert (await client.hello()).version == "x"
    await client.close()
    server.close()


def test_tokens_are_not_shown():
    route = replace(ROUTE, traffic_token="secret", access_token="secret")
    assert "secret" not in repr(route)


def test_the_command_line():
    argv = edge_argv(
        Path("/bin/edge"),
        listen=["127.0.0.1:8000", "[::1]:8000"],
        api=Path("/run/api"),
        control=Path("/run/ctl"),
        api_wait=0.5,
    )
    assert argv == (
        "/bin/edge",
        *("--listen", "127.0.0.1:8000", "--listen", "[::1]:8000"),
        *("--api", "unix:/run/api", "--control", "/run/ctl", "--api-wait", "0.5"),
        *("--wake-wait", "60", "--drain", "30"),
    )
    with_tls = edge_argv(
        Path("/bin/edge"),
        listen=[],
        api=Path("/run/api"),
        control=Path("/run/ctl"),
        tls=(Path("/c"), Path("/k")),
    )
    assert with_tls[-4:] == ("--tls-cert", "/c", "--tls-key", "/k")
