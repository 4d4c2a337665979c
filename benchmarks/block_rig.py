"""A store with layers, and block servers over it, for the benchmarks named blocks_*."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.server import built
from tests.waiting import until

from agentenv.config import Config
from agentenv.host import fuse
from agentenv.layer.blockd import BlockClient, BlockServerOptions, blockd_argv
from agentenv.layer.catalog import Image
from agentenv.layer.layers import BLOCK, Part, Span
from agentenv.node.library import Library, open_library
from agentenv.store import lease as leases

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"
SIZE = 64 << 30
_EPOCH = "1735689600"
_TRIM = (
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    '--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/* "$1"/var/log/*.log',
)
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def folder(name: str) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=f"aenv-bench-{name}-", dir="/var/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def debian(name: str, packages: str) -> Path:
    """A Debian root with these packages as a tar; built once, kept in .cache."""
    tar = CACHE / f"blocks-{name}.tar"
    if not tar.exists():
        draft = tar.with_suffix(".draft")
        argv = ["mmdebstrap", "--quiet", "--variant=minbase", "--format=tar", *_TRIM]
        environ = {**os.environ, "SOURCE_DATE_EPOCH": _EPOCH}
        argv += [f"--include={packages}", "bookworm", str(draft)]
        subprocess.run(argv, check=True, env=environ, stderr=subprocess.DEVNULL)
        draft.rename(tar)
    return tar


def large() -> Path:
    """An image of more than 300 MB with Python in it."""
    return debian("big", "python3,build-essential,git,procps")


def other() -> Path:
    """Built independently of `large`, from packages that are partly the same."""
    return debian("other", "python3,curl,ca-certificates,perl")


@dataclass
class Server:
    """A block server with a cache of its own."""

    client: BlockClient
    process: subprocess.Popen[bytes]
    cache: Path

    async def fetch_all(self, file: Path, chunks: Sequence[int]) -> None:
        """Have all chunks (so many of each layer of the stack) here."""
        every = [(layer, n) for layer, count in enumerate(chunks) for n in range(count)]
        await self.client.prefetch(file, every)
        while (await self.client.stats())["under_way"]:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)  # what has landed is still being written

    def pss(self) -> int:
        """Bytes of memory, shared ones by their part."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return int(re.findall(r"^Pss: +(\d+) kB", text, re.M)[0]) << 10


@asynccontextmanager
async def server(store: str, environ: dict[str, str] | None = None) -> AsyncIterator[Server]:
    """Over the store at this URL, with an empty cache; nothing is left of it."""
    with folder("blockd") as place:
        mount = place / "mount"
        mount.mkdir()
        fd = fuse.mount(mount)
        try:
            options = BlockServerOptions(
                built("agentenv-blockd"), store, place / "cache", SIZE, 1 << 30,
                place / "state", place / "control",
            )  # fmt: skip
            process = subprocess.Popen(
                blockd_argv(options, fd), pass_fds=[fd], env={**os.environ, **(environ or {})}
            )
            try:
                until(options.control.exists)
                client = BlockClient(options.control, mount)
                await client.hello()
                fuse.raise_read_ahead(mount)
                yield Server(client, process, options.cache)
            finally:
                process.kill()
                process.wait()
        finally:
            os.close(fd)
            fuse.unmount(mount, force=True)


@asynccontextmanager
async def library(home: Path, store: str = "") -> AsyncIterator[Library]:
    async with open_library(Config(home=home, store=store)) as opened:
        yield opened


async def pulled(library: Library, tar: Path) -> Image:
    return await library.catalog.pull(f"tar:{tar}")


async def written(
    library: Library, source: Path, spans: Sequence[Span], blocks: int, window: int = 0
) -> Part:
    async with leases.hold(library.layers.objects) as lease:
        return await library.layers.write(source, spans, blocks, window, lease)


async def chunk_counts(library: Library, parts: Sequence[Part]) -> list[int]:
    tables = [await library.layers.table(part.layer) for part in parts if part.layer]
    return [len(table.chunks()) for table in tables]


def drop(file: Path) -> None:
    """Take a file out of the page cache."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Latency:
    """Microseconds."""

    median: float
    ninety_ninth: float

    def __str__(self) -> str:
        return f"{self.median:.0f} / {self.ninety_ninth:.0f}"


def latency(nanoseconds: Sequence[int]) -> Latency:
    ordered = sorted(nanoseconds)
    at = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return Latency(statistics.median(ordered) / 1e3, at / 1e3)


def read_at(file: Path, offsets: Sequence[int], size: int = BLOCK) -> list[int]:
    """Nanoseconds of each read, without read-ahead."""
    fd = os.open(file, os.O_RDONLY)
    buffer, clock, found = [bytearray(size)], time.perf_counter_ns, list[int]()
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in offsets:
            begun = clock()
            count = os.preadv(fd, buffer, offset)
            found.append(clock() - begun)
            assert count == size, offset
    finally:
        os.close(fd)
    return found


def sequential(file: Path, limit: int = 1 << 40, *, direct: bool = False) -> float:
    """Bytes a second of reading it from its beginning, a mebibyte at a time."""
    fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    buffer = mmap.mmap(-1, 1 << 20)
    try:
        begun, done = time.perf_counter(), 0
        while done < limit and (count := os.preadv(fd, [buffer], done)):
            done += count
        return done / (time.perf_counter() - begun)
    finally:
        os.close(fd)
        buffer.close()


def scattered(size: int, count: int, seed: int = 1) -> list[int]:
    """Offsets of different blocks in random order."""
    blocks = random.Random(seed).sample(range(size // BLOCK), min(count, size // BLOCK))
    return [block * BLOCK for block in blocks]
