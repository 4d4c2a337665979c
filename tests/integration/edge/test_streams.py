"""Bodies and streams: framing, back-pressure, upgrades, and how they end."""

import asyncio
import contextlib
import json

import httpx
import pytest
import websockets
from tests.integration.edge.rig import ID, PORT, WEBSOCKET_PORT, head, read_chunk, read_head

pytestmark = pytest.mark.usefixtures("guest")
BY_HOST = {"Host": f"{PORT}-{ID}.example.org"}
MEGABYTE = 1 << 20


async def counts(http) -> dict[str, int]:
    return (await http.get("/counts", headers=BY_HOST)).json()


@contextlib.asynccontextmanager
async def asked(edge, request: bytes):
    """A connection on which ``request`` was sent."""
    reader, writer = await edge.connect()
    writer.write(request)
    try:
        yield reader, writer
    finally:
        writer.close()


async def assert_cut(reader: asyncio.StreamReader) -> None:
    """The connection is reset, so that what came cannot be taken for the whole."""
    with pytest.raises(ConnectionResetError):
        async with asyncio.timeout(10):
            while await reader.read(65536):
                pass


async def test_chunks_go_both_ways_while_the_request_is_under_way(edge):
    request = head("/echo", "Transfer-Encoding: chunked", method="POST")
    async with asked(edge, request) as (reader, writer):
        writer.write(b"5\r\nfirst\r\n")
        status, headers = await read_head(reader)
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        assert await read_chunk(reader) == b"first"
        for piece in (b"second", b"x" * 100_000):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            got = b""
            while len(got) < len(piece):
                got += await read_chunk(reader)
            assert got == piece
        writer.write(b"0\r\n\r\n")
        assert await read_chunk(reader) == b""


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST", "PUT"])
async def test_a_chunked_body_arrives_with_every_method(edge, method):
    request = head("/seen", "Transfer-Encoding: chunked", method=method) + b"3\r\nabc\r\n0\r\n\r\n"
    async with asked(edge, request) as (reader, _):
        _, headers = await read_head(reader)
        seen = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert seen["body"] == 3
        assert seen["headers"]["transfer-encoding"] == "chunked"
        assert "content-length" not in seen["headers"]


async def test_a_known_length_stays_known(http):
    seen = (await http.post("/seen", headers=BY_HOST, content=b"abc")).json()
    assert seen["headers"]["content-length"] == "3"
    assert "transfer-encoding" not in seen["headers"]


async def test_expect_continue_is_answered_by_the_edge(edge):
    request = head("/seen", "Content-Length: 3", "Expect: 100-continue", method="POST")
    async with asked(edge, request) as (reader, writer):
        assert (await read_head(reader))[0] == 100
        writer.write(b"abc")
        status, headers = await read_head(reader)
        seen = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert (status, seen["body"]) == (200, 3)
        assert "expect" not in seen["headers"]


async def test_an_old_client_gets_its_body_until_the_end(edge):
    request = head("/echo", "Content-Length: 3", method="POST", version="1.0") + b"abc"
    async with asked(edge, request) as (reader, _):
        _, headers = await read_head(reader)
        assert "transfer-encoding" not in headers
        assert await reader.read() == b"abc"


async def test_events_arrive_as_they_happen_and_a_client_that_leaves_is_noticed(edge, http):
    before = (await counts(http))["left_early"]
    async with asked(edge, head("/events")) as (reader, _):
        _, headers = await read_head(reader)
        assert headers["content-type"] == "text/event-stream"
        assert await read_chunk(reader) == b"data: first\n\n"
        assert (await counts(http))["left_early"] == before
    async with asyncio.timeout(10):
        while (await counts(http))["left_early"] == before:
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_before_the_answer_is_noticed(edge, http):
    before = await counts(http)
    async with asked(edge, head("/silent")):
        async with asyncio.timeout(10):
            while (await edge.control.stats()).sandboxes[ID].active == 0:
                await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        while (await counts(http))["left_early"] == before["left_early"]:
            await asyncio.sleep(0.01)


async def test_dropping_the_route_cuts_what_is_open(edge, http):
    async with (
        asked(edge, head("/events")) as (events, _),
        asked(edge, head("/silent")) as (silent, _),
        asked(edge, head(f"/bytes?{256 * MEGABYTE}")) as (stalled, _),
        asked(edge, head("/echo", "Transfer-Encoding: chunked", method="POST")) as (echo, up),
    ):
        await read_head(events)
        await read_chunk(events)
        await read_head(stalled)  # and no more: its writer in the edge is stuck
        up.write(b"1\r\nx\r\n")
        await read_head(echo)
        async with asyncio.timeout(10):
            while (await edge.control.stats()).sandboxes[ID].active < 4:
                await asyncio.sleep(0.01)
        assert await edge.control.drop(ID)
        for reader in (events, stalled, echo):
            await assert_cut(reader)
        # The one that had no head yet can still be told.
        status, headers = await read_head(silent)
        told = json.loads(await silent.readexactly(int(headers["content-length"])))
        assert (status, told["message"]) == (502, "The sandbox was not found")
    reply = await http.get("/health", headers={"E2b-Sandbox-Id": ID})
    assert (reply.status_code, reply.json()["message"]) == (502, "The sandbox was not found")
    assert not await edge.control.drop(ID)


@pytest.mark.parametrize("how", ["put", "sync"])
async def test_a_new_generation_cuts_the_old_and_a_new_policy_does_not(edge, http, slot, how):
    async def tell(route):
        if how == "put":
            await edge.control.put(route)
        else:
            assert await edge.control.sync([route], []) == ()

    request = head("/echo", "Transfer-Encoding: chunked", method="POST")
    async with asked(edge, request) as (reader, writer):
        writer.write(b"1\r\nx\r\n")
        await read_head(reader)
        assert await read_chunk(reader) == b"x"
        connections = (await counts(http))["connections"]
        await tell(slot.route(mask_host="masked"))
        writer.write(b"1\r\ny\r\n")
        assert await read_chunk(reader) == b"y"
        assert (await counts(http))["connections"] == connections
        await tell(slot.route(generation=2))
        await assert_cut(reader)
    after = await counts(http)
    assert after["connections"] == connections + 1  # none of the old pool
    assert (await edge.control.stats()).sandboxes[ID].requests >= 4  # the account goes on


async def test_a_broken_body_is_not_a_whole_one(edge):
    async with asked(edge, head("/cut")) as (reader, _):
        await read_head(reader)
        assert await read_chunk(reader) == b"half"
        assert await reader.read() == b""  # no last chunk


async def test_connections_to_the_guest_are_used_again(http):
    first = await counts(http)
    for _ in range(20):
        assert (await http.get("/seen", headers=BY_HOST)).status_code == 200
    last = await counts(http)
    assert last["connections"] == first["connections"]


@pytest.mark.parametrize("path", ["/last", "/rude"])
async def test_a_connection_that_the_guest_closed_is_not_the_clients_trouble(http, path):
    for _ in range(200):
        reply = await http.get(path, headers=BY_HOST)
        assert (reply.status_code, reply.text) == (200, "bye")
        assert "keep-alive" not in reply.headers


async def test_a_websocket(edge):
    url = f"ws://127.0.0.1:{edge.port}/chat"
    names = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": str(WEBSOCKET_PORT)}
    options = {"additional_headers": names, "max_size": None, "compression": None}
    async with websockets.connect(url, **options) as socket:
        for message in ("hello", b"\x00" * 5 * MEGABYTE):
            await socket.send(message)
            assert await socket.recv() == message
        assert (await edge.control.stats()).sandboxes[ID].active == 1
    async with asyncio.timeout(10):
        while (await edge.control.stats()).sandboxes[ID].active:
            await asyncio.sleep(0.01)
    traffic = (await edge.control.stats()).sandboxes[ID]
    assert traffic.bytes_in > 5 * MEGABYTE
    assert traffic.bytes_out > 5 * MEGABYTE


async def test_dropping_the_route_cuts_a_websocket(edge):
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", key)
    async with asked(edge, head("/", *lines, port=WEBSOCKET_PORT)) as (reader, _):
        status, headers = await read_head(reader)
        assert (status, headers["upgrade"].lower()) == (101, "websocket")
        await edge.control.drop(ID)
        await assert_cut(reader)


async def test_a_slow_reader_slows_the_guest_and_not_the_edges_memory(edge):
    size = 512 * MEGABYTE
    async with asked(edge, head(f"/bytes?{size}")) as (reader, _):
        await read_head(reader)
        peak = passed = 0
        while passed < size:
            passed += len(await reader.read(MEGABYTE))
            if passed % (16 * MEGABYTE) < MEGABYTE:
                await asyncio.sleep(0.002)
                peak = max(peak, edge.rss())
        assert passed == size
        assert peak < 48 * MEGABYTE
        sent = (await edge.control.stats()).sandboxes[ID].bytes_out
        assert sent == size


async def test_a_reader_that_stops_stops_the_guest(edge):
    async with asked(edge, head(f"/bytes?{512 * MEGABYTE}")) as (reader, _):
        await read_head(reader)
        sent, before = 0, -1
        while sent != before:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.3)
            sent = (await edge.control.stats()).sandboxes[ID].bytes_out
        assert sent < 64 * MEGABYTE
        assert edge.rss() < 48 * MEGABYTE


async def test_a_large_upload_passes_in_bounded_memory(edge, http):
    size, piece = 256 * MEGABYTE, b"u" * MEGABYTE

    async def pieces():
        for _ in range(size // MEGABYTE):
            yield piece

    reply = await http.post("/seen", headers=BY_HOST, content=pieces())
    assert reply.json()["body"] == size
    assert edge.rss() < 48 * MEGABYTE


async def test_many_at_once(edge):
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=edge.url, timeout=60, limits=limits) as many:

        async def one(number: int) -> bool:
            body = f"{number}".encode() * 1000
            reply = await many.post("/echo", headers=BY_HOST, content=body)
            return reply.content == body

        assert all(await asyncio.gather(*(one(n) for n in range(1000))))
    assert (await edge.control.stats()).sandboxes[ID].active == 0
