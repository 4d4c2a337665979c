"""From files of this node to layers in the store, behind everybody's back.

Files that lie in a row in the same snapshots are first merged into one: who pauses a hundred times
leaves one layer, not a hundred. Where a stack has grown deep, what lies above its lowest layer (the
template's, which many share) is merged as well.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from agentenv import _core
from agentenv.concurrency import Tasks
from agentenv.errors import AgentEnvError
from agentenv.layer.blockd import MEMORY, BlockClient
from agentenv.layer.layers import BLOCK, DISK_WINDOW, Layers, Part, Span
from agentenv.snapshot import manifest as manifests
from agentenv.snapshot.manifest import Element, Manifest, Stack
from agentenv.snapshot.raws import Raws
from agentenv.store import lease as leases
from agentenv.store.claims import Claims
from agentenv.store.lease import Lease
from agentenv.store.records import Records

log = logging.getLogger(__name__)

CLAIM = "snapshot"
MEMORY_WINDOW = 16  # blocks of a memory's chunk: 64 KiB
BY_CONTENT = 0  # chunks end where their content says
# What is resumed or paused again at once is not worth storing as it was.
SETTLED = 1.0  # seconds
RETRY = 30.0
# Replacements that a snapshot in the making may have missed.
REMEMBERED = 4096
# Opening a stack asks the block server once a layer.
MAX_DEPTH = 8

DiskSpans = Callable[[Path], Awaitable[list[Span]]]
"""What a disk file of the engine's holds."""


class Storing:
    """Works on the snapshots in ``known``, which it replaces there and in the records."""

    def __init__(
        self,
        known: dict[str, Manifest],
        raws: Raws,
        records: Records,
        layers: Layers,
        claims: Claims,
        blocks: BlockClient,
        disk_spans: DiskSpans,
    ) -> None:
        self._known, self._raws, self._records = known, raws, records
        self._layers, self._claims, self._blocks = layers, claims, blocks
        self._disk_spans = disk_spans
        self._stored: set[str] = set()
        self._replaced: dict[Element, tuple[Stack, Element]] = {}
        self.changing = asyncio.Lock()
        self._work = asyncio.Event()
        self._tasks = Tasks()

    def start(self, claimed: Sequence[str], done: Callable[[], object]) -> None:
        """``claimed``: snapshots that are in the store already. ``done`` is told when others are
        as well: files may have become useless."""
        self._stored = {each for each in claimed if each in self._known}
        self._tasks.start(self._run(done), "store snapshots")
        self.wake()

    async def close(self) -> None:
        await self._tasks.close()

    def wake(self) -> None:
        self._work.set()

    def is_stored(self, snapshot_id: str) -> bool:
        return snapshot_id in self._stored

    def has_stored(self, snapshot_id: str) -> None:
        self._stored.add(snapshot_id)

    def forget(self, manifest: Manifest) -> None:
        self._stored.discard(manifest.id)

    def lends(self, manifest: Manifest) -> bool:
        """Whether another snapshot counts on its layers and does not claim them itself yet."""
        return any(
            manifest.layers & other.layers
            for other in self._known.values()
            if other.id not in self._stored and other.id != manifest.id
        )

    async def _run(self, done: Callable[[], object]) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(SETTLED)
            self._work.clear()
            for snapshot_id in [each for each in self._known if each not in self._stored]:
                manifest = self._known.get(snapshot_id)
                if manifest is None:
                    continue  # forgotten meanwhile
                try:
                    with self._raws.kept(manifest.raws):
                        await self._store(snapshot_id)
                except AgentEnvError as error:
                    log.warning("snapshot %s is not stored yet: %s", snapshot_id, error.message)
                    asyncio.get_running_loop().call_later(RETRY, self.wake)
            done()

    async def _store(self, snapshot_id: str) -> None:
        async with leases.hold(self._layers.objects) as lease:
            await self._merge_own(snapshot_id)
            found = self._known.get(snapshot_id)
            # One file with everything is packed: what stays the same moves in it.
            window = MEMORY_WINDOW if found and found.disk else BY_CONTENT
            for element in self._memory_of(snapshot_id):
                if element.raw:
                    await self._store_memory(element.raw, element.blocks, window, lease)
            found = self._known.get(snapshot_id)
            for element in found.disk if found else ():
                if element.raw:
                    await self._store_disk(element.raw, element.blocks, lease)
            if len(self._memory_of(snapshot_id)) > MAX_DEPTH:
                await self._flatten(snapshot_id, lease)
            manifest = self._known.get(snapshot_id)
            if manifest is None:
                return  # forgotten meanwhile
            await lease.use([f"snapshot/{snapshot_id}"])
            await self._layers.objects.put(f"snapshot/{snapshot_id}", manifests.to_json(manifest))
            lease.check()
            await self._claims.put(snapshot_id, keys(manifest), CLAIM)
            self._stored.add(snapshot_id)
            log.info("snapshot %s is stored", snapshot_id)

    def _memory_of(self, snapshot_id: str) -> Stack:
        manifest = self._known.get(snapshot_id)
        return (manifest.memory or ()) if manifest else ()

    async def _merge_own(self, snapshot_id: str) -> None:
        """Make one file of those in a row that the same snapshots have."""
        for group in self._groups(snapshot_id):
            if len(group) > 1:
                await self._merge(group)

    def _groups(self, snapshot_id: str) -> list[Stack]:
        """The files of a memory, those together that are in the same snapshots."""

        def users(element: Element) -> frozenset[str]:
            having = (m.id for m in self._known.values() if element in (m.memory or ()))
            return frozenset(having)

        files = [each for each in self._memory_of(snapshot_id) if each.raw]
        return [tuple(group) for _, group in itertools.groupby(files, users)]

    async def _merge(self, own: Stack) -> None:
        names = [each.raw for each in own if each.raw]
        with self._raws.making(1) as (fresh,):
            files = [self._raws.memory(raw) for raw in names]
            runs = [await asyncio.to_thread(self._raws.read_runs, raw) for raw in names]
            size = own[0].blocks * BLOCK
            laid = list(zip(files, runs, strict=True))
            await asyncio.to_thread(self._raws.merge, laid, fresh, size)
            await self._replace(own, Element(own[0].blocks, raw=fresh))

    async def _store_memory(self, raw: str, blocks: int, window: int, lease: Lease) -> None:
        path = self._raws.memory(raw)
        runs = await asyncio.to_thread(self._raws.read_runs, raw)
        spans = _core.run_spans(runs)
        part = await self._layers.write(path, spans, blocks, window, lease)
        await self._layers.keep_here(part, path)
        await self._replace([Element(blocks, raw=raw)], Element(blocks, part.layer))
        await self._pin(part, raw)

    async def _pin(self, part: Part, raw: str) -> None:
        """The file is the cache's now: for those who have it open it must stay whole."""
        assert part.layer
        await self._blocks.rescan()
        for holder in self._raws.users(raw):
            await self._blocks.open_stack(part.blocks, [(part.layer, 0)], holder, MEMORY)
            self._raws.is_pinned(raw, holder)

    async def _store_disk(self, raw: str, blocks: int, lease: Lease) -> None:
        path = self._raws.disk(raw)
        spans = await self._disk_spans(path)
        part = await self._layers.write(path, spans, blocks, DISK_WINDOW, lease)
        await self._replace([Element(blocks, raw=raw)], Element(blocks, part.layer))

    async def _flatten(self, snapshot_id: str, lease: Lease) -> None:
        """One layer of all above the lowest."""
        upper = self._memory_of(snapshot_id)[1:]
        blocks, holder = upper[0].blocks, f"flatten-{snapshot_id}"
        try:
            laid: list[tuple[Path, bytes]] = []
            for element in upper:
                assert element.layer
                one = [(element.layer, 0)]
                path = await self._blocks.open_stack(blocks, one, holder, MEMORY)
                table = await self._layers.table(element.layer)
                laid.append((path, _core.layer_runs(table)))
            with self._raws.making(1) as (fresh,):
                await asyncio.to_thread(self._raws.merge, laid, fresh, blocks * BLOCK)
                await self._replace(upper, Element(blocks, raw=fresh))
                await self._store_memory(fresh, blocks, MEMORY_WINDOW, lease)
        finally:
            await self._blocks.close(holder)

    async def _replace(self, old: Sequence[Element], new: Element) -> None:
        """Elements in a row by one that holds the same, in every snapshot that has them."""
        async with self.changing:
            self._remember(tuple(old), new)
            for manifest in list(self._known.values()):
                changed = manifest.replaced(tuple(old), new)
                if changed != manifest and manifest.id in self._known:
                    self._known[manifest.id] = changed
                    await self._records.put_snapshot(manifests.to_row(changed))

    def _remember(self, old: Stack, new: Element) -> None:
        self._replaced[old[0]] = (old, new)
        if len(self._replaced) > REMEMBERED:
            del self._replaced[next(iter(self._replaced))]

    def current(self, manifest: Manifest) -> Manifest:
        """One that was made of others some time ago, of what these consist of now."""
        todo = [*manifest.disk, *(manifest.memory or ())]
        while todo:
            if found := self._replaced.get(todo.pop()):
                manifest = manifest.replaced(*found)
                todo.append(found[1])
        return manifest


def keys(manifest: Manifest) -> list[str]:
    """What the store must keep for it."""
    return [f"snapshot/{manifest.id}", *(f"layer/{layer}" for layer in sorted(manifest.layers))]
