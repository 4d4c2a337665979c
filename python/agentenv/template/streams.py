"""Blocking work between asynchronous streams: a thread at the other end of bounded pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import IO, Any

from agentenv.concurrency import Tasks

CHUNK = 256 << 10  # bytes


def written(work: Callable[[IO[bytes]], object]) -> AsyncGenerator[bytes]:
    """What ``work`` writes, as it writes it; what it raises is raised after the last piece."""
    return _written(work, lambda: None)


async def changed(
    pieces: AsyncIterable[bytes], work: Callable[[IO[bytes], IO[bytes]], object]
) -> AsyncGenerator[bytes]:
    """What ``work`` makes of a stream, as it comes."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    tasks = Tasks()
    feeding = tasks.start(_feed(pieces, write), "feeder", awaited=True)

    def run(out: IO[bytes]) -> None:
        with os.fdopen(read, "rb", buffering=CHUNK) as source:
            work(source, out)
            while source.read(CHUNK):
                pass  # so that the sender is not cut off

    # A thread that waits for the stream ends with the feeder, so that one goes first.
    async with contextlib.aclosing(_written(run, feeding.cancel)) as made:
        async for piece in made:
            yield piece
    await feeding


async def _written(
    work: Callable[[IO[bytes]], object], on_end: Callable[[], object]
) -> AsyncGenerator[bytes]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    tasks = Tasks()

    def run() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(write, "wb", buffering=CHUNK) as out:
            work(out)

    working = tasks.start(asyncio.to_thread(run), "writer", awaited=True)
    is_whole = False
    try:
        while piece := await _read(read):
            yield piece
        is_whole = True
    finally:
        os.close(read)  # the thread's next write fails, if there is one
        if not is_whole:
            on_end()
        await asyncio.wait([working])
    working.result()


async def _read(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError):
            return os.read(fd, CHUNK)
        await _ready(fd, loop.add_reader, loop.remove_reader)


async def _feed(pieces: AsyncIterable[bytes], fd: int) -> None:
    loop = asyncio.get_running_loop()
    try:
        async for piece in pieces:
            view = memoryview(piece)
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    await _ready(fd, loop.add_writer, loop.remove_writer)
    except BrokenPipeError:
        pass  # the reader says why
    finally:
        os.close(fd)


async def _ready(fd: int, watch: Callable[..., Any], leave: Callable[[int], Any]) -> None:
    done = asyncio.Event()
    watch(fd, done.set)
    try:
        await done.wait()
    finally:
        leave(fd)
