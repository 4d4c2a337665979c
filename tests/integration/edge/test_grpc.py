"""gRPC through the edge: HTTP/2 from end to end, the status in the trailers."""

import asyncio
import sys
from pathlib import Path

import h2.events
import pytest
from tests.integration.edge import rig
from tests.integration.edge.rig import ID
from tests.integration.edge.test_tls import edge, multiplexed, pair, trust

__all__ = ["edge", "multiplexed", "pair", "trust"]  # fixtures

GRPC_PORT = 8083
HOST = f"{GRPC_PORT}-{ID}.example.org"
GRPC = (("content-type", "application/grpc+proto"), ("te", "trailers"))


@pytest.fixture
async def server(slot):
    script = str(Path(__file__).with_name("guest_grpc.py"))
    words = ("ip", "netns", "exec", slot.guest, sys.executable, script)
    async with rig.process(*words, rig.GUEST, str(GRPC_PORT)) as child:
        assert await child.stdout.readline() == b"ready\n"
        yield child


@pytest.mark.usefixtures("server")
async def test_messages_both_ways_and_the_status_at_the_end(multiplexed):
    for _ in range(3):
        stream = multiplexed.request(HOST, "/Echo/Talk", *GRPC, method="POST", end=False)
        headers = await multiplexed.head(stream)
        assert (headers["x-authority"], headers["x-path"]) == (HOST, "/Echo/Talk")
        assert (headers["x-te"], headers["x-scheme"]) == ("trailers", "http")
        assert not {"x-host", "x-transfer-encoding", "x-content-length"} & set(headers)
        for message in (b"one", b"two"):
            multiplexed.send(stream, message)
            assert await multiplexed.data(stream, 3) == message
        multiplexed.send(stream, b"", end=True)
        trailers = await multiplexed.next(stream, h2.events.TrailersReceived)
        assert dict(trailers.headers) == {"grpc-status": "0"}
        await multiplexed.next(stream, h2.events.StreamEnded)


@pytest.mark.usefixtures("server")
async def test_a_status_without_a_message(multiplexed):
    stream = multiplexed.request(HOST, "/refuse", *GRPC, method="POST")
    assert (await multiplexed.head(stream))["grpc-status"] == "7"
    await multiplexed.next(stream, h2.events.StreamEnded)


@pytest.mark.usefixtures("server")
async def test_many_calls_at_once(multiplexed, edge):
    streams = [
        multiplexed.request(HOST, "/Echo/Talk", *GRPC, method="POST", end=False) for _ in range(100)
    ]
    for stream in streams:
        multiplexed.send(stream, b"x%d" % stream, end=True)
    for stream in streams:
        event = await multiplexed.next(stream, h2.events.DataReceived)
        assert event.data == b"x%d" % stream
        await multiplexed.next(stream, h2.events.StreamEnded)
    assert (await edge.all_ended(ID)).requests == 100


async def test_a_drop_cuts_calls_and_lets_go_of_the_guest(multiplexed, edge, server):
    call = multiplexed.request(HOST, "/Echo/Talk", *GRPC, method="POST", end=False)
    multiplexed.send(call, b"x")
    assert await multiplexed.data(call, 1) == b"x"
    await edge.control.drop(ID)
    await multiplexed.next(call, h2.events.StreamReset)
    assert await asyncio.wait_for(server.stdout.readline(), 10) == b"lost\n"


@pytest.mark.usefixtures("guest")
async def test_a_server_that_speaks_http1_only_is_said_so(multiplexed):
    host = f"{rig.PORT}-{ID}.example.org"
    stream = multiplexed.request(host, "/seen", *GRPC, method="POST")
    assert (await multiplexed.head(stream))[":status"] == "502"
    web = ("content-type", "application/grpc-web")
    stream = multiplexed.request(host, "/seen", web, method="POST")
    assert (await multiplexed.head(stream))[":status"] == "200"


@pytest.mark.usefixtures("server")
async def test_calls_to_one_that_sleeps_wait_until_it_is_awake(multiplexed, edge, slot):
    await edge.control.put(slot.asleep())
    kept, given_up = (
        multiplexed.request(HOST, "/Echo/Talk", *GRPC, method="POST", end=False) for _ in range(2)
    )
    multiplexed.send(kept, b"early")
    await edge.under_way(2)
    assert (await edge.control.wakes(-1, 20))[1] == [ID]
    multiplexed.h2.reset_stream(given_up)
    multiplexed.flush()
    await edge.under_way(1)
    await edge.control.put(slot.route())
    await multiplexed.head(kept)
    assert await multiplexed.data(kept, 5) == b"early"
    multiplexed.send(kept, b"", end=True)
    await multiplexed.next(kept, h2.events.StreamEnded)
