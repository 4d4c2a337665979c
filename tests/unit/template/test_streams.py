import asyncio
import contextlib
import os

import pytest

from agentenv.template.streams import CHUNK, changed, written


async def gathered(stream) -> bytes:
    return b"".join([piece async for piece in stream])


async def pieces(*data: bytes):
    for each in data:
        yield each


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_what_is_written_comes_in_order_and_bounded_pieces():
    data = os.urandom(3 * CHUNK + 17)
    assert await gathered(written(lambda out: out.write(data))) == data
    assert await gathered(written(lambda out: None)) == b""


async def test_a_failure_comes_after_what_was_written():
    def work(out):
        out.write(b"some")
        raise ValueError("broken")

    stream = written(work)
    assert await anext(stream) == b"some"
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)


async def test_streams_are_changed_as_they_come():
    data = os.urandom(2 * CHUNK)
    found = changed(pieces(b"", data, b"end"), lambda source, out: out.write(source.read()[::-1]))
    assert await gathered(found) == (data + b"end")[::-1]


async def test_what_the_work_leaves_is_read_to_its_end():
    fed = []

    async def source():
        for number in range(40):
            fed.append(number)
            yield bytes(CHUNK)

    assert await gathered(changed(source(), lambda source, out: out.write(source.read(1)))) == b"\0"
    assert len(fed) == 40


async def test_a_failing_source_fails_the_stream():
    async def source():
        yield b"x"
        raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        await gathered(changed(source(), lambda source, out: out.write(source.read())))


async def test_leaving_early_ends_the_thread_and_leaks_nothing():
    async def endless():
        while True:
            yield bytes(CHUNK)

    async def stalled():
        yield b"x"
        await asyncio.Event().wait()

    def copy(source, out):
        while piece := source.read1(CHUNK):
            out.write(piece)
            out.flush()

    before = descriptors()
    for source in (endless, stalled):
        async with contextlib.aclosing(changed(source(), copy)) as stream:
            assert await anext(stream)
    async with contextlib.aclosing(
        written(lambda out: [out.write(bytes(CHUNK)) for _ in range(99)])
    ) as stream:
        await anext(stream)
    assert descriptors() == before


async def test_cancelling_who_waits_ends_it():
    async def stalled():
        await asyncio.Event().wait()
        yield b""

    before = descriptors()
    waiting = asyncio.create_task(gathered(changed(stalled(), lambda source, out: source.read())))
    await asyncio.sleep(0)
    while descriptors() == before:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert descriptors() == before
