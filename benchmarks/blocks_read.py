"""Reads through the block server: cold, sequential, warm, passed through, against the plain file.

Files lie on the same file system. Every cold read finds neither file in the page cache; both are
read without read-ahead. Ways take turns, figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import zstandard
from tests.server import TestServer

from agentenv import _core
from agentenv.layer.layers import BLOCK, Part
from agentenv.node.library import Library
from benchmarks import block_rig as rig
from benchmarks.machine import heading, row

ROUNDS = 5
READS = 2000
CHUNKS = 1000
STACKS = 1000
# The index: layers, extents of each, different blocks of content.
LAYERS, EXTENTS, CONTENTS = 32, 31_250, 256
PAUSE = 0.002  # seconds between two measured fetches: what keeps a chunk is not the read's


def run(_: TestServer | None) -> None:
    asyncio.run(_measure())


async def _measure() -> None:
    with rig.folder("read") as folder:
        async with rig.library(folder / "home") as library:
            image = await rig.pulled(library, rig.large())
            plain = folder / "plain"
            await library.layers.unpack(image.parts, plain)
            heading("what", "ours", "against", "ratio or difference", "target")
            store = str(folder / "home/store")
            counts = await rig.chunk_counts(library, image.parts)
            async with rig.server(store) as server:
                served = await server.client.open(image.parts, "image")
                await server.fetch_all(served, counts)
                _cached(served, plain)
                _sequential(served, plain)
                _warm(served, plain)
            await _passthrough(library, store, image.parts[-1], folder)
            await _compressed(library, store, image.parts[-1], folder)
            await _many_stacks(library, store, image.parts, folder)
            await _index(library, store, folder)


def _medians(one: Callable[[], float], two: Callable[[], float]) -> tuple[float, float]:
    pairs = [(one(), two()) for _ in range(ROUNDS)]
    return (
        statistics.median(first for first, _ in pairs),
        statistics.median(second for _, second in pairs),
    )


def _cached(served: Path, plain: Path) -> None:
    offsets = rig.scattered(plain.stat().st_size, READS)
    ours, theirs = list[rig.Latency](), list[rig.Latency]()
    for _ in range(ROUNDS):
        for file, found in ((served, ours), (plain, theirs)):
            rig.drop(file)
            found.append(rig.latency(rig.read_at(file, offsets)))
    mine, its = _middle(ours), _middle(theirs)
    added = f"+{mine.median - its.median:.0f} / {mine.ninety_ninth - its.ninety_ninth:+.0f} us"
    row("cold 4 KiB, chunk in the cache (p50 / p99 us)", mine, f"plain {its}", added, "<= +25 us")


def _middle(found: list[rig.Latency]) -> rig.Latency:
    return rig.Latency(
        statistics.median(one.median for one in found),
        statistics.median(one.ninety_ninth for one in found),
    )


def _sequential(served: Path, plain: Path) -> None:
    def cold(file: Path) -> Callable[[], float]:
        return lambda: (rig.drop(file), rig.sequential(file))[1]

    ours, theirs = _medians(cold(served), cold(plain))
    _rates("sequential, from the cache", ours, theirs, ">= 1 GB/s")


def _warm(served: Path, plain: Path) -> None:
    for file in (served, plain):
        rig.sequential(file)
    ours, theirs = _medians(lambda: rig.sequential(served), lambda: rig.sequential(plain))
    _rates("sequential, warm", ours, theirs, "page cache")
    offsets = rig.scattered(plain.stat().st_size, READS)
    mine, its = _medians(
        lambda: rig.latency(rig.read_at(served, offsets)).median,
        lambda: rig.latency(rig.read_at(plain, offsets)).median,
    )
    row(
        "4 KiB, warm (p50 us)", f"{mine:.2f}", f"plain {its:.2f}", f"{mine / its:.2f}", "page cache"
    )


def _rates(name: str, ours: float, theirs: float, target: str) -> None:
    shown = (f"{ours / 1e9:.2f} GB/s", f"plain {theirs / 1e9:.2f} GB/s", f"{ours / theirs:.2f}")
    row(name, *shown, target)


async def _passthrough(library: Library, store: str, part: Part, folder: Path) -> None:
    """A layer that is whole in the cache and alone in its stack."""
    plain = folder / "layer"
    await library.layers.unpack([part], plain)
    async with rig.server(store) as server:
        served = await server.client.open([part], "layer")
        await server.fetch_all(served, await rig.chunk_counts(library, [part]))
        with served.open():
            assert (await server.client.stats())["passthrough"] == 1

            def cold(file: Path, behind: Path) -> Callable[[], float]:
                return lambda: (rig.drop(file), rig.drop(behind), rig.sequential(file))[2]

            behind = next(server.cache.rglob("*.data"))
            ours, theirs = _medians(cold(served, behind), cold(plain, plain))
            _rates("passthrough, sequential, cold", ours, theirs, ">= 0.8")
            ours, theirs = _medians(lambda: rig.sequential(served), lambda: rig.sequential(plain))
            _rates("passthrough, sequential, warm", ours, theirs, ">= 0.8")
            offsets = rig.scattered(plain.stat().st_size, READS)

            def reads(file: Path, behind: Path) -> Callable[[], float]:
                def once() -> float:
                    rig.drop(behind)
                    return rig.latency(rig.read_at(file, offsets)).median

                return once

            mine, its = _medians(reads(served, behind), reads(plain, plain))
            row("passthrough, cold 4 KiB (p50 us)", f"{mine:.0f}", f"plain {its:.0f}",
                f"{its / mine:.2f}", ">= 0.8")  # fmt: skip


async def _compressed(library: Library, store: str, part: Part, folder: Path) -> None:
    """Chunks that only the store has, against reading and decompressing their stored bytes."""
    assert part.layer
    root, plain = Path(store), folder / "layer"
    table = await library.layers.table(part.layer)
    chunks = table.chunks()
    places, begins, at = _data_offsets(plain), list[int](), 0
    for chunk in chunks:
        begins.append(places[at])
        at += chunk[2]
    every = max(2, len(chunks) // CHUNKS)  # apart, so that nothing is read ahead
    picked = [(chunks[n], begins[n]) for n in range(0, len(chunks), every) if chunks[n][3] == 1]
    ours, theirs = list[int](), list[int]()
    async with rig.server(store) as server:
        served = await server.client.open([part], "layer")
        fd = os.open(served, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            for chunk, begin in picked:
                pack = root / "pack" / chunk[4][:2] / chunk[4]
                theirs.append(_plainly(pack, chunk))
                time.sleep(PAUSE)
                ours.append(_fetched(fd, pack, begin, chunk))
                time.sleep(PAUSE)
        finally:
            os.close(fd)
        assert (await server.client.stats())["fetch"]["fetched_chunks"] <= len(picked) + 1
    mine, its = rig.latency(ours), rig.latency(theirs)
    row("cold 4 KiB, chunk only in the store (p50 / p99 us)", mine, f"pread + zstd {its}",
        f"{mine.median / its.median:.2f}", "<= 1.3")  # fmt: skip


def _data_offsets(plain: Path) -> list[int]:
    """Of the blocks that are not zeroes: a layer's data is these."""
    zero, data = bytes(BLOCK), plain.read_bytes()
    return [at for at in range(0, len(data), BLOCK) if data[at : at + BLOCK] != zero]


def _forget(pack: int, chunk: _core.Chunk) -> None:
    begin = chunk[5] // BLOCK * BLOCK
    os.posix_fadvise(pack, begin, chunk[5] - begin + chunk[1], os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(pack, 0, 0, os.POSIX_FADV_DONTNEED)


def _plainly(pack: Path, chunk: _core.Chunk) -> int:
    """Nanoseconds."""
    unpacker = zstandard.ZstdDecompressor()
    fd = os.open(pack, os.O_RDONLY)
    try:
        _forget(fd, chunk)
        begun = time.perf_counter_ns()
        stored = os.pread(fd, chunk[1], chunk[5])
        plain = unpacker.decompress(stored, max_output_size=chunk[2] * BLOCK)
        taken = time.perf_counter_ns() - begun
        assert len(plain) == chunk[2] * BLOCK
        return taken
    finally:
        os.close(fd)


def _fetched(served: int, pack: Path, begin: int, chunk: _core.Chunk) -> int:
    fd = os.open(pack, os.O_RDONLY)
    _forget(fd, chunk)
    os.close(fd)
    begun = time.perf_counter_ns()
    os.pread(served, BLOCK, begin)
    return time.perf_counter_ns() - begun


async def _many_stacks(library: Library, store: str, base: tuple[Part, ...], folder: Path) -> None:
    """A thousand sandboxes' disks: the image with a layer of its own over it, each."""
    source = folder / "changes"
    blocks = 64
    source.write_bytes(os.urandom(blocks * BLOCK))
    total = sum(part.blocks for part in base)
    beneath, at = list[tuple[str, int]](), 0
    for part in base:
        assert part.layer
        beneath.append((part.layer, at))
        at += part.blocks
    async with rig.server(store) as server:
        await server.client.open_stack(total, beneath, "none")
        alone = server.pss()
        for number in range(STACKS):
            spans = [(n * 40 + number, 1, n * BLOCK) for n in range(blocks)]
            part = await rig.written(library, source, spans, total, 32)
            assert part.layer
            file = await server.client.open_stack(total, [*beneath, (part.layer, 0)], str(number))
            with file.open("rb") as opened:
                opened.seek(number * BLOCK)
                assert opened.read(BLOCK)
        stats, used = await server.client.stats(), server.pss()
        assert stats["stacks"] == STACKS + 1
    row(f"memory of a server with {STACKS} stacks (Pss)", f"{used / 1e6:.0f} MB",
        f"one stack {alone / 1e6:.0f} MB", f"{(used - alone) / STACKS / 1e3:.1f} KB each",
        "< 100 MB")  # fmt: skip


async def _index(library: Library, store: str, folder: Path) -> None:
    """Reads that are looked up among 10^6 extents of 32 layers, against one extent."""
    source = folder / "contents"
    source.write_bytes(os.urandom(CONTENTS * BLOCK))
    blocks, layers = 2 * LAYERS * EXTENTS, list[tuple[str, int]]()
    for layer in range(LAYERS):
        spans = [(2 * (LAYERS * n + layer), 1, n % CONTENTS * BLOCK) for n in range(EXTENTS)]
        part = await rig.written(library, source, spans, blocks)
        assert part.layer
        layers.append((part.layer, 0))
    one = await rig.written(library, source, [(0, CONTENTS, 0)], CONTENTS)
    assert one.layer
    async with rig.server(store) as server:
        simple = await server.client.open_stack(CONTENTS + 1, [(one.layer, 0)], "one")
        many = await server.client.open_stack(blocks, layers, "many")
        few = rig.scattered(CONTENTS * BLOCK, 200)
        lots = [2 * at for at in rig.scattered(LAYERS * EXTENTS * BLOCK, 200)]
        for file, offsets in ((simple, few), (many, lots)):
            rig.read_at(file, offsets)  # now the chunks are here
        await asyncio.sleep(1)
        ours, theirs = list[rig.Latency](), list[rig.Latency]()
        for _ in range(4 * ROUNDS):
            for file, offsets, found in ((many, lots, ours), (simple, few, theirs)):
                rig.drop(file)
                found.append(rig.latency(rig.read_at(file, offsets)))
        mine, its = _middle(ours), _middle(theirs)
        memory = f"{server.pss() / 1e6:.0f} MB"
    row("cold 4 KiB, 10^6 extents in 32 layers (p50 / p99 us)", mine, f"one extent {its}",
        f"{mine.median / its.median:.2f}; server {memory}", "~ 1")  # fmt: skip
