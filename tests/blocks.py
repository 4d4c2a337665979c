"""A block server of a test's own: a real store, layers in it, the mounted files, their plain twins."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv import _core
from agentenv.errors import InfraError
from agentenv.host import fuse
from agentenv.host.process import ProcessSpec
from agentenv.host.supervised import SupervisedLauncher
from agentenv.layer.blockd import DISK, BlockClient, BlockServerOptions, blockd_argv
from tests.waiting import until

BLOCK = 4096
ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "target/release/agentenv-blockd"
FD = 3  # in a supervised server
NAME = "blockd"
MIB = 1 << 20


@dataclass(frozen=True)
class Layer:
    """A layer in the store and what it holds: block number to bytes, None for zeroes."""

    id: str
    blocks: int
    content: dict[int, bytes | None]
    pack: str | None


def extents(
    rng: random.Random, blocks: int, share: float = 0.5, longest: int = 64
) -> dict[int, bytes | None]:
    """Random extents of data and zeroes, with holes between."""
    content, at = dict[int, bytes | None](), 0
    while at < blocks:
        count = min(rng.randint(1, longest), blocks - at)
        if rng.random() < share:
            zero = rng.random() < 0.2
            noise = rng.random() < 0.5
            for block in range(at, at + count):
                data = rng.randbytes(BLOCK) if noise else rng.randbytes(64) * (BLOCK // 64)
                content[block] = None if zero else data
        at += count
    return content


def noise(seed: int, blocks: int) -> dict[int, bytes | None]:
    """A full layer that does not compress."""
    rng = random.Random(seed)
    return {block: rng.randbytes(BLOCK) for block in range(blocks)}


@dataclass
class Store:
    """Writes layers; chunks that it wrote before are referenced."""

    url: str
    scratch: Path
    known: dict[bytes, _core.Chunk] = field(default_factory=dict[bytes, "_core.Chunk"])

    def __post_init__(self) -> None:
        self.objects = _core.Objects(self.url)

    def file(self, kind: str, name: str) -> Path:
        """Where a store in a directory has an object."""
        return Path(self.url) / kind / name[:2] / name

    def write(self, content: dict[int, bytes | None], blocks: int, window: int = 0) -> Layer:
        source, pack = self.scratch / "source", self.scratch / "pack"
        spans = list[tuple[int, int, int]]()
        with source.open("wb") as file:
            for block, data in sorted(content.items()):
                at = file.tell()
                file.write(data or bytes(BLOCK))
                if spans and block == sum(spans[-1][:2]):
                    spans[-1] = (spans[-1][0], spans[-1][1] + 1, spans[-1][2])
                else:
                    spans.append((block, 1, at))
        written = _core.write_layer(
            source, blocks, spans, window, lambda ids: [self.known.get(i) for i in ids], pack
        )
        if written.pack:
            self.objects.put_file(f"pack/{written.pack[0]}", pack)
        self.objects.put(f"layer/{written.layer.id}", written.layer.encode())
        self.known.update({chunk[0]: chunk for chunk in written.layer.chunks()})
        own = written.pack[0] if written.pack else None
        return Layer(written.layer.id, blocks, content, own)


def flat(layers: Sequence[tuple[Layer, int]], blocks: int) -> bytes:
    """What a stack must read as, made block by block."""
    out = bytearray(blocks * BLOCK)
    for layer, at in layers:
        for block, data in layer.content.items():
            out[(at + block) * BLOCK : (at + block + 1) * BLOCK] = data or bytes(BLOCK)
    return bytes(out)


@dataclass
class BlockServer:
    """A server on a mount of its own. ``stop`` and ``kill`` leave the mount; ``start`` serves it
    again."""

    folder: Path
    options: BlockServerOptions
    mount: Path
    fd: int
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    launcher: SupervisedLauncher | None = None

    def __post_init__(self) -> None:
        self.client = BlockClient(self.options.control, self.mount)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    async def start(self, **changed: Any) -> None:
        self.options = replace(self.options, **changed)
        argv = blockd_argv(self.options, self.fd)
        environment = os.environ | {"AENV_RESTARTS": str(self.starts)}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self.fd,),
            )
        self.starts += 1
        await self.answering()

    async def supervise(self, launcher: SupervisedLauncher) -> None:
        spec = ProcessSpec(NAME, blockd_argv(self.options, FD), self.folder / "log", restart=True)
        await launcher.launch(spec, [self.fd])
        self.launcher = launcher
        await self.answering()

    async def answering(self) -> None:
        async with asyncio.timeout(20):
            while True:
                try:
                    await self.client.hello()
                    return
                except InfraError:
                    ended = self.process is not None and self.process.poll() is not None
                    assert not ended, self.log
                    await asyncio.sleep(0.02)

    def end(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(20)
        self.process = None

    async def open(
        self,
        layers: Sequence[Layer | tuple[Layer, int]],
        holder: str = "one",
        kind: str = DISK,
        blocks: int | None = None,
    ) -> tuple[Path, bytes]:
        """The stack's file and what it must hold."""
        placed = [each if isinstance(each, tuple) else (each, 0) for each in layers]
        end = blocks or max(at + layer.blocks for layer, at in placed)
        ids = [(layer.id, at) for layer, at in placed]
        path = await self.client.open_stack(end, ids, holder, kind)
        return path, flat(placed, end)

    async def fetched(self) -> dict[str, int]:
        return (await self.client.stats())["fetch"]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def cached(self, kind: str) -> list[Path]:
        return sorted(self.options.cache.glob(f"*/*.{kind}"))

    async def close(self) -> None:
        fuse.unmount(self.mount, force=True)
        os.close(self.fd)
        if self.launcher is not None:
            await self.launcher.stop(NAME, signal.SIGKILL)
            await self.launcher.wait(NAME)
            await self.launcher.quit()
        elif self.process is not None:
            self.end()


def drop_pages(path: Path) -> None:
    """Have the kernel forget what it read of a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@asynccontextmanager
async def block_folder(place: str = "/var/tmp") -> AsyncGenerator[Path]:
    """A folder with a short path, on the disk unless a test says otherwise. What is mounted or runs
    below it at the end fails."""
    folder = Path(tempfile.mkdtemp(prefix="aenv-b-", dir=place))
    try:
        yield folder
        left = [
            line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line
        ]
        assert not left, left
        until(lambda: not _processes_of(folder))
    finally:
        shutil.rmtree(folder)


def _processes_of(folder: Path) -> list[str]:
    found = list[str]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def directory_store(folder: Path) -> Store:
    (folder / "store").mkdir(exist_ok=True)
    return Store(str(folder / "store"), folder)


@asynccontextmanager
async def block_server(
    folder: Path, store: str, name: str = "a", *, supervised: bool = False, **options: Any
) -> AsyncGenerator[BlockServer]:
    """One that runs, over ``store``. ``options`` are those of ``BlockServerOptions``."""
    own = folder / name
    mount = own / "mount"
    mount.mkdir(parents=True)
    chosen = {"size": 1 << 40, "free": 0, "patience": 10.0, "cache": own / "cache"} | options
    settings = BlockServerOptions(
        binary=PROGRAM, store=store, state=own / "state", control=own / "control", **chosen
    )
    server = BlockServer(own, settings, mount, fuse.mount(mount))
    try:
        if supervised:
            launcher = SupervisedLauncher(own / "s")
            await launcher.ensure()
            await server.supervise(launcher)
        else:
            await server.start()
        await asyncio.to_thread(fuse.raise_read_ahead, mount)
        yield server
    except BaseException:
        print(server.log)
        raise
    finally:
        await server.close()


async def settled(server: BlockServer) -> dict[str, Any]:
    """Statistics once nothing is on its way."""
    async with asyncio.timeout(20):
        while (stats := await server.client.stats())["under_way"]:
            await asyncio.sleep(0.01)
    return stats


async def all_closed(server: BlockServer) -> None:
    """Waits until no stack is left: the kernel tells of closed files in its own time."""
    async with asyncio.timeout(20):
        while (stats := await server.client.stats())["stacks"]:
            await asyncio.sleep(0.02)
    assert stats["open_layers"] == 0


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes."""
    path.mkdir(parents=True)
    argv = ("mount", "-t", "tmpfs", "-o", f"size={size}", "aenv-test", str(path))
    subprocess.run(argv, check=True)
    try:
        yield path
    finally:
        # A process that has just ended may hold it for a moment more.
        until(lambda: not subprocess.run(("umount", str(path))).returncode)
