"""From a tar to a stored image: the whole way and its parts, and what images share.

Seconds of processor time decide (`per core`): what runs at the same time on several cores counts
for each of them. Every round writes into an empty store in a directory.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import zstandard
from tests.server import TestServer

from agentenv import _core
from agentenv.layer import convert
from agentenv.layer.catalog import Image
from agentenv.layer.layers import BLOCK
from agentenv.node.library import Library
from benchmarks import block_rig as rig
from benchmarks import oci
from benchmarks.machine import heading, row

ROUNDS = 3
OWN = 1 << 20  # bytes of an image's own layer


def run(_: TestServer | None) -> None:
    asyncio.run(_speed(rig.large()))
    with rig.folder("tops") as folder:
        asyncio.run(_sharing(folder))


class Cost:
    """Of the lines inside `measured`, this process with its threads and children."""

    seconds = 0.0
    cpu = 0.0


@contextmanager
def measured() -> Iterator[Cost]:
    cost = Cost()
    begun, used = time.perf_counter(), _cpu()
    try:
        yield cost
    finally:
        cost.seconds, cost.cpu = time.perf_counter() - begun, _cpu() - used


def _cpu() -> float:
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


async def _speed(tar: Path) -> None:
    size = tar.stat().st_size
    heading("what", "seconds", "MB/s", "processor seconds", "MB/s per core", "target")
    with rig.folder("write") as folder:
        whole = [await _pull(tar) for _ in range(ROUNDS)]
        _show("convert and store an image, all of it", size, whole, ">= 100 MB/s per core")
        data = folder / "data"
        blocks = 0

        def unpack() -> None:
            nonlocal blocks
            done, _ = convert.unpack(
                data, lambda: tar.open("rb"), lambda _: None, threading.Event()
            )
            blocks = done.blocks

        _show("– unpack (tar to blocks and tree, SHA-256)", size, _rounds(unpack))
        spans, pack = [(0, blocks, 0)], folder / "pack"

        def nothing(ids: list[bytes]) -> list[_core.Chunk | None]:
            return [None for _ in ids]

        written = _rounds(lambda: _core.write_layer(data, blocks, spans, 0, nothing, pack))
        _show("– cut, hash, compress, write the pack", size, written)
        chunks = {
            c[0]: c for c in _core.write_layer(data, blocks, spans, 0, nothing, pack).layer.chunks()
        }

        def all_known(ids: list[bytes]) -> list[_core.Chunk | None]:
            return [chunks[one] for one in ids]

        again = _rounds(
            lambda: _core.write_layer(data, blocks, spans, 0, all_known, folder / "none")
        )
        _show("  – of it read, cut, hash", size, again)
        plain = data.read_bytes()
        pieces = [plain[at : at + (32 * BLOCK)] for at in range(0, len(plain), 32 * BLOCK)]
        _show("  – of it zstd, level 3 (one thread)", size, _rounds(lambda: _compress(pieces)))
        objects = _core.Objects(str(folder / "objects"))
        stored = _rounds(lambda: objects.put_file("pack/ab", pack))
        _show("– lay the pack into the store, synced", size, stored)


def _compress(pieces: list[bytes]) -> None:
    packer = zstandard.ZstdCompressor(level=3)
    for piece in pieces:
        packer.compress(piece)


def _rounds(work: Callable[[], object]) -> list[Cost]:
    found: list[Cost] = []
    for _ in range(ROUNDS):
        with measured() as cost:
            work()
        found.append(cost)
    return found


async def _pull(tar: Path) -> Cost:
    with rig.folder("pull") as home:
        async with rig.library(home / "home") as library:
            with measured() as cost:
                await rig.pulled(library, tar)
            return cost


def _show(name: str, size: int, costs: list[Cost], target: str = "") -> None:
    seconds = statistics.median(cost.seconds for cost in costs)
    cpu = statistics.median(cost.cpu for cost in costs)
    row(name, f"{seconds:.2f}", f"{size / seconds / 1e6:.0f}", f"{cpu:.2f}",
        f"{size / cpu / 1e6:.0f}", target)  # fmt: skip


async def _sharing(folder: Path) -> None:
    """Two images of one base, and two that were built independently."""
    tops = [folder / f"top-{number}.tar" for number in range(2)]
    for top in tops:
        with tarfile.open(top, "w") as tar:
            member = tarfile.TarInfo("own")
            member.size = OWN
            tar.addfile(member, BytesIO(os.urandom(OWN)))
    one, two = rig.large(), rig.other()
    print()
    heading("second image", "plain MB", "stored MB", "of it", "cached MB", "target")
    await _share(f"the same base, {OWN / 1e6:.0f} MB of its own", [one, tops[0]], [one, tops[1]])
    await _share("built apart from packages partly the same", [one], [two])


async def _share(name: str, first: list[Path], second: list[Path]) -> None:
    with rig.folder("share") as folder:
        async with rig.library(folder / "home") as library:
            store = folder / "home/store"
            stored, images = [_bytes(store)], list[Image]()
            for number, tars in enumerate((first, second)):
                layout = folder / str(number)
                oci.layout(layout, tars)
                images.append(await library.catalog.pull(f"oci:{layout}"))
                stored.append(_bytes(store))
            cached = await _cached(library, str(store), images)
    new, plain = stored[2] - stored[1], images[1].size
    row(name, f"{plain / 1e6:.0f}", f"{new / 1e6:.2f}", f"{new / (stored[1] - stored[0]):.1%} of the first's",
        f"{cached[1] / 1e6:.1f} after {cached[0] / 1e6:.1f}", "the base once")  # fmt: skip


async def _cached(library: Library, store: str, images: list[Image]) -> list[int]:
    """Bytes in the cache that each image brought."""
    async with rig.server(store) as server:
        held = [0]
        for number, image in enumerate(images):
            for part in image.parts:
                file = await server.client.open([part], str(number))
                await server.fetch_all(file, await rig.chunk_counts(library, [part]))
            held.append((await server.client.stats())["cache_bytes"])
    return [held[1], held[2] - held[1]]


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
