"""Name resolution: asked from inside the guest, answered by upstreams of the host."""

import asyncio
import contextlib
import struct
import sys
from pathlib import Path

import pytest
from tests.integration.edge import rig

from agentenv.errors import InfraError
from agentenv.node.edge import Resolver

NAME = b"\x07example\x03org\x00"
QUESTION = NAME + struct.pack("!HH", 1, 1)
ADDRESS = b"\xc0\x00\x02\x01"
ANSWER = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + ADDRESS


def query(number: int, question: bytes = QUESTION, flags: int = 0x0100) -> bytes:
    return struct.pack("!6H", number, flags, 1, 0, 0, 0) + question


def reply_to(asked: bytes, flags: int = 0x8180, records: bytes = ANSWER) -> bytes:
    return asked[:2] + struct.pack("!5H", flags, 1, bool(records), 0, 0) + asked[12:] + records


class Upstream(asyncio.DatagramProtocol):
    """A resolver on loopback, UDP and TCP on one port; ``answer`` makes replies of a query."""

    def __init__(self, answer=lambda asked: [reply_to(asked)]) -> None:
        self.answer, self.seen, self.ports = answer, [], []

    def connection_made(self, transport) -> None:
        self.transport = transport

    def datagram_received(self, data, addr) -> None:
        self.seen.append(data)
        self.ports.append(addr[1])
        for reply in self.answer(data):
            self.transport.sendto(reply, addr)

    async def converse(self, reader, writer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                asked = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
                self.seen.append(asked)
                for reply in self.answer(asked):
                    writer.write(len(reply).to_bytes(2, "big") + reply)
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self.converse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", port)
        )
        try:
            yield f"127.0.0.1:{port}"
        finally:
            transport.close()
            server.close()


ASK = """
import socket, sys
kind, timeout, messages = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
s.settimeout(timeout)
s.connect(("10.233.0.1", 53))
for message in map(bytes.fromhex, messages):
    s.sendall(message if kind == "udp" else len(message).to_bytes(2, "big") + message)
for _ in messages:
    try:
        if kind == "udp":
            print(s.recv(65535).hex())
        else:
            f = s.makefile("rb", buffering=0)
            size = int.from_bytes(f.read(2), "big")
            got = b""
            while len(got) < size:
                got += f.read(size - len(got))
            print(got.hex())
    except TimeoutError:
        print("timeout")
"""


async def ask(slot, kind: str, *messages: bytes, timeout: float = 30) -> list[bytes]:
    """Sends from inside the guest; b"" for each reply that did not come."""
    words = (sys.executable, "-c", ASK, kind, str(timeout), *(m.hex() for m in messages))
    async with rig.process("ip", "netns", "exec", slot.guest, *words) as child:
        lines = (await child.stdout.read()).decode().split()
    return [b"" if line == "timeout" else bytes.fromhex(line) for line in lines]


@contextlib.asynccontextmanager
async def resolver(edge, slot, *upstreams: str):
    made = Resolver("slot-1", slot.netns, f"{rig.GATEWAY}:53", upstreams)
    await edge.control.dns_up(made)
    try:
        yield made
    finally:
        await edge.control.dns_down("slot-1")


@pytest.mark.parametrize("kind", ["udp", "tcp"])
async def test_a_guest_gets_its_answers(edge, slot, kind):
    upstream = Upstream()
    async with upstream.running() as address, resolver(edge, slot, address):
        replies = await ask(slot, kind, query(7), query(8), query(9))
    assert sorted(replies) == [reply_to(query(number)) for number in (7, 8, 9)]
    assert [sent[2:] for sent in upstream.seen] == [query(0)[2:]] * 3
    if kind == "udp":
        assert len(set(upstream.ports)) == 3


async def test_ids_are_not_the_guests(edge, slot):
    upstream = Upstream()
    async with upstream.running() as address, resolver(edge, slot, address):
        await ask(slot, "udp", *[query(7)] * 8)
        assert len({sent[:2] for sent in upstream.seen}) > 4
        assert (await edge.control.stats()).dns_queries == 8


@pytest.mark.parametrize("kind", ["udp", "tcp"])
async def test_a_dead_upstream_is_passed_over(edge, slot, kind):
    silent, living = Upstream(lambda _: []), Upstream()
    async with (
        silent.running() as first,
        living.running() as second,
        resolver(edge, slot, "127.0.0.1:1", first, second),
    ):
        assert await ask(slot, kind, query(7)) == [reply_to(query(7))]
        assert await ask(slot, kind, query(8)) == [reply_to(query(8))]
    assert (len(silent.seen), len(living.seen)) == (1, 2)  # the second time it is asked first


async def test_an_upstream_that_declines_is_passed_over(edge, slot):
    declining = Upstream(lambda asked: [reply_to(asked, 0x8185, b"")])
    living = Upstream()
    async with declining.running() as first, living.running() as second:
        async with resolver(edge, slot, first, second):
            assert await ask(slot, "udp", query(7)) == [reply_to(query(7))]
        async with resolver(edge, slot, first):
            assert await ask(slot, "udp", query(7)) == [reply_to(query(7), 0x8185, b"")]


async def test_when_nobody_answers(edge, slot):
    async with resolver(edge, slot, "127.0.0.1:1"):
        for kind in ("udp", "tcp"):
            assert await ask(slot, kind, query(7)) == [reply_to(query(7), 0x8182, b"")]


async def test_forged_replies_do_not_reach_the_guest(edge, slot):
    other = QUESTION.replace(b"example", b"exbmple")

    def forgeries(asked: bytes) -> list[bytes]:
        wrong_id = bytes([asked[0] ^ 1]) + asked[1:]
        return [
            reply_to(wrong_id),
            reply_to(asked[:12] + other),
            asked,
            b"",
            reply_to(asked),
        ]

    async with Upstream(forgeries).running() as address, resolver(edge, slot, address):
        assert await ask(slot, "udp", query(7)) == [reply_to(query(7))]


async def test_malformed_queries_are_dropped(edge, slot):
    upstream = Upstream()
    bad = [
        b"\0",
        query(1)[:-1],
        query(2, flags=0x8180),
        query(3, b"\xc0\x0c\0\x01\0\x01"),
        query(4)[:4] + b"\0\x02" + query(4)[6:],
    ]
    async with upstream.running() as address, resolver(edge, slot, address):
        replies = await ask(slot, "udp", *bad, query(7), timeout=2)
    assert replies == [reply_to(query(7)), *[b""] * len(bad)]
    assert len(upstream.seen) == 1


async def test_a_large_answer_passes_whole(edge, slot):
    records = ANSWER * 3000

    def large(asked: bytes) -> list[bytes]:
        return [reply_to(asked, records=records)]

    async with Upstream(large).running() as address, resolver(edge, slot, address):
        assert await ask(slot, "tcp", query(7)) == [reply_to(query(7), records=records)]


async def test_a_flood_is_bounded_and_passes(edge, slot):
    silent = Upstream(lambda _: [])
    async with silent.running() as address, resolver(edge, slot, address):
        await ask(slot, "udp", *[query(1)] * 400, timeout=0.01)
        descriptors = len(list(Path(f"/proc/{edge.child.pid}/fd").iterdir()))
        assert descriptors < 200
        silent.answer = lambda asked: [reply_to(asked)]
        async with asyncio.timeout(20):
            while await ask(slot, "udp", query(7), timeout=0.5) != [reply_to(query(7))]:
                pass


async def test_up_again_with_other_upstreams_and_down(edge, slot):
    first, second = Upstream(), Upstream()
    async with first.running() as one, second.running() as two:
        async with resolver(edge, slot, one) as made:
            await edge.control.dns_up(made)  # the same again: nothing happens
            await ask(slot, "udp", query(7))
            assert (
                await edge.control.sync([], [Resolver(made.slot, made.netns, made.listen, (two,))])
                == ()
            )
            await ask(slot, "udp", query(7))
            assert (len(first.seen), len(second.seen)) == (1, 1)
            assert await edge.control.sync([], []) == ()
            assert not await edge.control.dns_down("slot-1")
        # The address is free at once.
        async with resolver(edge, slot, one):
            assert await ask(slot, "udp", query(7)) == [reply_to(query(7))]


async def test_two_slots_have_the_same_addresses(edge, slot):
    upstream = Upstream()
    with rig.slot() as other:
        async with upstream.running() as address, resolver(edge, slot, address):
            await edge.control.dns_up(
                Resolver("slot-2", other.netns, f"{rig.GATEWAY}:53", (address,))
            )
            for asked in (slot, other):
                assert await ask(asked, "udp", query(7)) == [reply_to(query(7))]
        await edge.control.dns_down("slot-2")


@pytest.mark.parametrize(
    "change", [{"netns": "/run/netns/edge-no"}, {"listen": "203.0.113.1:53"}, {"upstreams": ()}]
)
async def test_what_cannot_be(edge, slot, change):
    good = {"netns": slot.netns, "listen": f"{rig.GATEWAY}:53", "upstreams": ("127.0.0.1:53",)}
    bad = Resolver(slot="bad", **(good | change))
    with pytest.raises(InfraError) as caught:
        await edge.control.dns_up(bad)
    assert caught.value.code == "dns_failed"
    (failed,) = await edge.control.sync([], [bad])
    assert failed.name == "bad"
