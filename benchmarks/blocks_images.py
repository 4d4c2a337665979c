"""A first command in an image that is not here: blocks on demand against the whole image.

What `python3` reads of the image's file system when it imports three modules is recorded once on
this machine (from an empty page cache, at the device below EROFS) and read again, one read after
another, from a block server with an empty cache. Its store is a real S3 server behind a slow link
(`benchmarks.link`); the whole images come through the same link. Boot and computing are left out
on our side, running the command on the others'.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.s3 import s3_server
from tests.server import TestServer

from agentenv.layer.catalog import Image
from agentenv.layer.layers import BLOCK, Part
from benchmarks import block_rig as rig
from benchmarks.link import link
from benchmarks.machine import heading, row
from benchmarks.whole_images import Whole, whole_images

COMMAND = ("python3", "-c", "import json, ssl, sqlite3")
ROUND_TRIP = 0.02
RATES = {"1 Gbit/s": 125e6, "100 Mbit/s": 12.5e6}
ROUNDS = 3
TRACING = Path("/sys/kernel/tracing")

Reads = list[tuple[int, int]]
"""Offset and length in the flat image."""


def run(_: TestServer | None) -> None:
    missing = [tool for tool in ("skopeo", "umoci", "mksquashfs", "zstd") if not shutil.which(tool)]
    if missing:
        print(f"skipped: install skopeo, umoci, squashfs-tools, zstd (no {', '.join(missing)})")
        return
    asyncio.run(_measure())


async def _measure() -> None:
    with rig.folder("images") as folder:
        async with s3_server() as s3:
            os.environ.update(s3.keys)
            async with rig.library(folder / "home", s3.url()) as library:
                image = await rig.pulled(library, rig.large())
                flat = folder / "flat"
                await library.layers.unpack(image.parts, flat)
            reads = recorded(flat)
            size = rig.large().stat().st_size
            count, read = len(reads), sum(length for _, length in reads)
            print(f"{' '.join(COMMAND)}: {count} reads, {read / 1e6:.1f} of {size / 1e6:.0f} MB\n")
            with whole_images(rig.large(), flat, folder) as wholes:
                for name, rate in RATES.items():
                    print(f"\n{name}, round trip {ROUND_TRIP * 1e3:.0f} ms:\n")
                    with link(s3.port, round_trip=ROUND_TRIP, rate=rate) as port:
                        store = s3.url(endpoint=f"http://localhost:{port}")
                        await _at(rate, store, image, reads, size, wholes)


async def _at(
    rate: float, store: str, image: Image, reads: Reads, size: int, wholes: Sequence[Whole]
) -> None:
    heading("way", "seconds", "fetched MB", "of the image", "against the fastest pull and unpack")
    pulls = [(whole, whole.take(ROUND_TRIP, rate)) for whole in wholes]
    fastest = min(seconds for whole, seconds in pulls if whole.unpacked)
    alone: list[tuple[float, int]] = []
    listed: list[tuple[float, int]] = []
    first_use: list[list[tuple[int, int]]] = []
    for _ in range(ROUNDS):
        alone.append(await _replay(store, image, reads, [], first_use))
        listed.append(await _replay(store, image, reads, first_use[0:2], []))
        del first_use[2:]
    for name, found in (("on demand", alone), ("on demand, with the list", listed)):
        seconds = statistics.median(one for one, _ in found)
        fetched = statistics.median(one for _, one in found)
        row(name, f"{seconds:.2f}", f"{fetched / 1e6:.1f}", f"{fetched / size:.1%}",
            f"{seconds / fastest:.2f}")  # fmt: skip
    for whole, seconds in pulls:
        row(whole.name, f"{seconds:.2f}", f"{whole.bytes / 1e6:.1f}", f"{whole.bytes / size:.1%}",
            f"{seconds / fastest:.2f}")  # fmt: skip


async def _replay(
    store: str,
    image: Image,
    reads: Reads,
    first_use: Sequence[Sequence[tuple[int, int]]],
    learned: list[list[tuple[int, int]]],
) -> tuple[float, int]:
    """Seconds from the question for the image to the last read; bytes that came."""
    parts = [part for part in image.parts if part.layer]
    async with rig.server(store, dict(os.environ)) as server:
        begun = time.perf_counter()
        files = [await server.client.open([part], "one") for part in parts]
        for file, chunks in zip(files, first_use, strict=False):
            await server.client.prefetch(file, chunks)
        await asyncio.to_thread(_read_all, files, list(_placed(parts, reads)))
        seconds = time.perf_counter() - begun
        fetched = (await server.client.stats())["fetch"]["fetched_bytes"]
        tables = sum(file.stat().st_size for file in server.cache.rglob("*.table"))
        learned += [await server.client.first_use(file) for file in files]
        return seconds, fetched + tables


def _placed(parts: Sequence[Part], reads: Reads) -> Iterator[tuple[int, int, int]]:
    """Number of the part, offset in it, length."""
    for offset, length in reads:
        at = 0
        for number, part in enumerate(parts):
            end = at + part.blocks * BLOCK
            begin, stop = max(offset, at), min(offset + length, end)
            if begin < stop:
                yield number, begin - at, stop - begin
            at = end


def _read_all(files: Sequence[Path], reads: Sequence[tuple[int, int, int]]) -> None:
    fds = [os.open(file, os.O_RDONLY) for file in files]
    try:
        for number, offset, length in reads:
            assert len(os.pread(fds[number], length, offset)) == length
    finally:
        for fd in fds:
            os.close(fd)


def recorded(flat: Path) -> Reads:
    """What the command reads of the image, in order."""
    with _mounted(flat) as (root, device):
        subprocess.run(["chroot", root, "true"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        with _traced(device) as lines:
            subprocess.run(["chroot", root, *COMMAND], check=True)
        found = [re.findall(r" R\w* (\d+) \(\) (\d+) \+ (\d+) ", line) for line in lines()]
    reads = [(int(at) * 512, int(count) * 512) for ((_, at, count),) in filter(None, found)]
    assert reads, "the kernel told of no reads"
    return reads


@contextmanager
def _mounted(flat: Path) -> Iterator[tuple[str, str]]:
    """The image's root, and the number of its device."""
    device = subprocess.check_output(["losetup", "--find", "--show", "-r", flat], text=True).strip()
    root = flat.with_name("root")
    root.mkdir()
    try:
        subprocess.run(["mount", "-t", "erofs", "-o", "ro", device, root], check=True)
        try:
            numbers = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
            yield str(root), numbers
        finally:
            subprocess.run(["umount", root], check=True)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)
        root.rmdir()


@contextmanager
def _traced(device: str):
    """Tells the block requests to a device, as lines; to be asked for at the end."""
    mine = not (TRACING / "trace").exists()
    if mine:
        subprocess.run(["mount", "-t", "tracefs", "tracefs", TRACING], check=True)
    instance = TRACING / f"instances/aenv-bench-{os.getpid()}"
    instance.mkdir()
    event = instance / "events/block/block_rq_issue"
    major, minor = map(int, device.split(":"))
    lines: list[str] = []
    try:
        (event / "filter").write_text(f"dev == {major << 20 | minor}")
        (event / "enable").write_text("1")
        yield lambda: lines
        (event / "enable").write_text("0")
        wanted = f" {major},{minor} "
        lines += [line for line in (instance / "trace").read_text().splitlines() if wanted in line]
    finally:
        instance.rmdir()
        if mine:
            subprocess.run(["umount", TRACING], check=True)
