"""Homes with snapshots: a real store, a real block server, memory files of known content."""

from __future__ import annotations

import asyncio
import random
import struct
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests import corpus
from tests.blocks import BLOCK, BlockServer, block_folder, block_server
from tests.library import opened

from agentenv.layer.layers import Part
from agentenv.model import Guest, Resources, new_id
from agentenv.node.library import Library
from agentenv.snapshot import storing
from agentenv.snapshot.manifest import Element, Manifest, Stack
from agentenv.snapshot.repository import Snapshots
from agentenv.store import lease as leases
from agentenv.store.records import SandboxRow

PAGES = 64
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
Content = dict[int, bytes | None]
"""Page number to its bytes; None for a page that became zeroes."""


def pages(seed: int, *numbers: int) -> Content:
    """Noise in pages with these numbers."""
    rng = random.Random(seed)
    return {number: rng.randbytes(BLOCK) for number in numbers}


def flat(*layers: Content) -> bytes:
    """The newest content of every page."""
    laid: Content = {}
    for layer in layers:
        laid |= layer
    return b"".join(laid.get(page) or bytes(BLOCK) for page in range(PAGES))


def runs(content: Content) -> bytes:
    return b"".join(struct.pack("<III", page, 1, content[page] is None) for page in sorted(content))


async def until_async(condition) -> None:
    async with asyncio.timeout(8):
        while not condition():
            await asyncio.sleep(0.02)


@dataclass
class Home:
    """A home whose snapshots may be restarted."""

    library: Library
    server: BlockServer
    folder: Path
    image: str
    base: Part
    disk_spans: object
    snapshots: Snapshots = field(init=False)
    making: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.make()

    def make(self) -> None:
        self.snapshots = Snapshots(
            self.folder / "snapshots",
            self.library.records,
            self.library.layers,
            self.library.claims,
            self.server.client,
            self.library.catalog,
            self.disk_spans,  # pyright: ignore[reportArgumentType]
        )

    async def restart(self) -> None:
        await self.snapshots.close()
        self.make()
        await self.snapshots.start()

    def raw(self, content: Content) -> Element:
        """A memory as a machine leaves it."""
        name, raws = self._fresh(), self.snapshots.raws
        path = raws.make_memory(name, PAGES * BLOCK)
        with path.open("rb+") as file:
            for page, data in content.items():
                file.seek(page * BLOCK)
                file.write(data or b"")
        raws.put_runs(name, runs(content))
        return Element(PAGES, raw=name)

    def _fresh(self) -> str:
        """A name whose files no sweep takes before a snapshot is added."""
        name = new_id()
        self.making.enter_context(self.snapshots.raws.kept([name]))
        return name

    def raw_disk(self, content: Content) -> Element:
        """A disk; this home's engine writes flat ones."""
        name = self._fresh()
        self.snapshots.raws.disk(name).write_bytes(flat(content))
        return Element(PAGES, raw=name)

    async def add(self, memory: Stack | None, disk: Stack = (), needed: bool = True) -> Manifest:
        """A snapshot, with the sandbox that is paused in it if it is ``needed``."""
        made = Manifest(
            id=new_id(),
            created=NOW,
            sandbox_id=new_id(),
            parent=None,
            image_id=self.image,
            resources=Resources(1, 1, 1),
            guest=Guest(),
            features={},
            disk=disk or (Element(self.base.blocks, self.base.layer),),
            memory=memory,
            state="",
        )
        await self.snapshots.add(made, sandbox(made) if needed else None)
        self.making.close()
        return made

    def now(self, made: Manifest) -> Manifest:
        found = self.snapshots.known(made.id)
        assert found is not None
        return found

    def is_stored(self, made: Manifest) -> bool:
        return (self.folder.parent / "store/snapshot" / made.id[:2] / made.id).exists()

    async def stored(self, made: Manifest) -> Manifest:
        """Waits until it is in the store, and needs no file of this node."""
        await until_async(lambda: self.is_stored(made))
        found = self.now(made)
        assert not found.raws
        return found

    async def content(self, stack: Stack) -> bytes:
        """What a memory or disk of layers in the store holds."""
        layers = [(each.layer, 0) for each in stack if each.layer]
        path = await self.server.client.open_stack(stack[0].blocks, layers, "reader")
        try:
            return await asyncio.to_thread(path.read_bytes)
        finally:
            await self.server.client.close("reader")

    def files(self) -> set[str]:
        return {path.stem for path in (self.folder / "snapshots").iterdir()}

    async def end(self, made: Manifest) -> None:
        """Nobody needs it any more."""
        await self.library.records.put_sandbox(sandbox(made, "ended"))
        self.snapshots.tidy()


def sandbox(made: Manifest, state: str = "paused") -> SandboxRow:
    return SandboxRow(
        made.sandbox_id, state, "t", "b", made.image_id, made.id, made.id, None, NOW, NOW, {}, {}
    )


async def flat_spans(path: Path) -> list[tuple[int, int, int | None]]:
    return [(0, path.stat().st_size // BLOCK, 0)]


@asynccontextmanager
async def home_in(folder: Path, name: str = "home"):
    home = folder / name
    store = folder / "store"
    layout = folder / "layout"
    if not layout.exists():
        corpus.write(layout, [corpus.Layer("gzip").add("a", data=b"a")])
    async with opened(home, store=str(store)) as library:
        image = await library.catalog.pull(f"oci:{layout}")
        source = home / "base"
        source.write_bytes(corpus.noise(PAGES * BLOCK))
        async with leases.hold(library.layers.objects) as lease:
            spans: list[tuple[int, int, int | None]] = [(0, PAGES, 0)]
            base = await library.layers.write(source, spans, PAGES, 16, lease)
        async with block_server(folder, str(store), f"s-{name}", cache=home / "cache") as server:
            made = Home(library, server, home, image.id, base, flat_spans)
            await made.snapshots.start()
            try:
                yield made
            finally:
                await made.snapshots.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Snapshots are stored at once."""
    monkeypatch.setattr(storing, "SETTLED", 0.0)


@pytest.fixture
async def folder():
    async with block_folder() as made:
        yield made


@pytest.fixture
async def home(folder):
    async with home_in(folder) as made:
        yield made
