"""The snapshots of a node: remembered, opened for machines, stored in the background, forgotten.

A snapshot is durable on the node as soon as it is recorded: its files survive every process. Then
`storing` moves them into the store, where other nodes find it (``snapshot/ID``). It lives as long
as a template or a sandbox needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv import _core
from agentenv.concurrency import Tasks
from agentenv.errors import AgentEnvError, InfraError, NotFound
from agentenv.layer.blockd import MEMORY, BlockClient
from agentenv.layer.catalog import ImageCatalog
from agentenv.layer.layers import Layers
from agentenv.snapshot import manifest as manifests
from agentenv.snapshot.manifest import Element, Manifest, Stack
from agentenv.snapshot.raws import Raws
from agentenv.snapshot.storing import CLAIM, DiskSpans, Storing, keys
from agentenv.store import lease as leases
from agentenv.store.claims import Claims
from agentenv.store.records import Records, SandboxRow

log = logging.getLogger(__name__)

MAX_STORED = 16 << 20  # bytes of a snapshot's object


@dataclass(frozen=True, slots=True)
class Opened:
    """What a machine is made from: its disks, lowest first, its memory's files and their map. An
    engine that is not layered has no disk (``Traits``)."""

    disk_base: Path | None
    disk_below: tuple[Path, ...]
    memory_map: bytes
    memory: tuple[Path, ...]


class Snapshots:
    """``start`` first, ``close`` last."""

    def __init__(
        self,
        folder: Path,
        records: Records,
        layers: Layers,
        claims: Claims,
        blocks: BlockClient,
        catalog: ImageCatalog,
        disk_spans: DiskSpans,
    ) -> None:
        self._records, self._layers, self._claims = records, layers, claims
        self._blocks, self._catalog = blocks, catalog
        self.raws = Raws(folder)
        self._known: dict[str, Manifest] = {}
        self._damaged: set[str] = set()
        self._held: dict[str, int] = {}
        self._runs: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._tasks = Tasks()
        self._tidying: asyncio.Task[None] | None = None
        self._untidy = False
        self._started = False
        self._storing = Storing(self._known, self.raws, records, layers, claims, blocks, disk_spans)

    async def start(self) -> None:
        """Find what an earlier server left. Raises InfraError."""
        await asyncio.to_thread(self.raws.prepare)
        for row in await self._records.snapshots():
            try:
                self._known[row.id] = manifests.from_doc(row.doc)
            except InfraError as error:
                log.error("snapshot %s: %s", row.id, error.message)
                self._damaged.add(row.id)
        self._started = True
        self._storing.start(await self._claimed(), self.tidy)
        self.tidy()

    async def _claimed(self) -> list[str]:
        """Those whose layers the store keeps for us; claims of others are dropped."""
        try:
            found = await self._claims.own(CLAIM)
            for claim in found:
                if claim not in self._known and claim not in self._damaged:
                    await self._claims.drop(claim, CLAIM)
        except InfraError as error:  # stored once more, which changes nothing
            log.warning("claims of snapshots are not tidied now: %s", error.message)
            return []
        return found

    async def close(self) -> None:
        await self._storing.close()
        await self._tasks.close()

    async def add(self, manifest: Manifest, sandbox: SandboxRow | None = None) -> None:
        """Record it, with the sandbox that is paused in it: durable when it returns."""
        async with self._storing.changing:
            manifest = self._storing.current(manifest)
            await self._records.put_snapshot(manifests.to_row(manifest), sandbox)
            self._known[manifest.id] = manifest
        self._storing.wake()

    def known(self, snapshot_id: str) -> Manifest | None:
        return self._known.get(snapshot_id)

    def all(self) -> Sequence[Manifest]:
        return list(self._known.values())

    async def bytes_of(self, element: Element) -> int:
        """Bytes of a layer that are no zeroes, or what its files on this node take.

        Raises ImageError, InfraError.
        """
        if element.raw:
            return await asyncio.to_thread(self.raws.bytes_of, element.raw)
        assert element.layer
        if element.layer not in self._sizes:
            self._sizes[element.layer] = (await self._layers.table(element.layer)).data_bytes
        return self._sizes[element.layer]

    async def find(self, snapshot_id: str) -> Manifest:
        """One of this node's, or one in the store, which is this node's as well from now on.

        Raises NotFound (``snapshot_not_found``), InfraError, ImageError.
        """
        if found := self._known.get(snapshot_id):
            return found
        if snapshot_id in self._damaged:
            raise InfraError(
                f"the record of snapshot {snapshot_id} cannot be read", code="snapshot_damaged"
            )
        data = await self._layers.objects.get(f"snapshot/{snapshot_id}", MAX_STORED)
        if data is None:
            raise NotFound(f"snapshot '{snapshot_id}' not found", code="snapshot_not_found")
        found = manifests.from_json(data)
        await self._catalog.pull(f"store:{found.image_id}")
        async with leases.hold(self._layers.objects) as lease:
            for layer in found.layers:
                if not await self._layers.stays(layer, lease):
                    raise NotFound(
                        f"snapshot '{snapshot_id}' is not complete in the store",
                        why=f"layer {layer} is missing",
                        code="snapshot_not_found",
                    )
            lease.check()
            await self._claims.put(found.id, keys(found), CLAIM)
        await self._records.put_snapshot(manifests.to_row(found))
        self._known[found.id] = found
        self._storing.has_stored(found.id)
        return found

    @asynccontextmanager
    async def held(self, snapshot_id: str) -> AsyncGenerator[Manifest]:
        """A snapshot that stays until the block ends, needed or not."""
        self._held[snapshot_id] = self._held.get(snapshot_id, 0) + 1
        try:
            yield await self.find(snapshot_id)
        finally:
            self._held[snapshot_id] -= 1
            if not self._held[snapshot_id]:
                del self._held[snapshot_id]
                self.tidy()

    async def open(self, manifest: Manifest, holder: str) -> Opened:
        """For a machine, until ``release``. Raises InfraError, ImageError."""
        current = self._known.get(manifest.id, manifest)  # files may have become layers since
        manifest = replace(current, memory=current.memory if manifest.memory else None)
        for raw in manifest.raws:
            self.raws.use(raw, holder)
        stack = manifest.memory or ()
        (base, below), files, runs = await asyncio.gather(
            self._open_disk(manifest.disk, holder),
            asyncio.gather(*(self._open_memory(each, holder) for each in stack)),
            asyncio.gather(*(self._runs_of(each) for each in stack)),
        )
        laid = list(zip(files, runs, strict=True))
        memory_map = await asyncio.to_thread(_core.memory_map, laid)
        return Opened(base, below, memory_map, tuple(files))

    async def _open_disk(self, stack: Stack, holder: str) -> tuple[Path | None, tuple[Path, ...]]:
        if not stack:
            return None, ()
        stored = [(each.layer, 0) for each in stack if each.layer]
        below = tuple(self.raws.disk(each.raw) for each in stack if each.raw)
        return await self._blocks.open_stack(stack[0].blocks, stored, holder), below

    async def _open_memory(self, element: Element, holder: str) -> Path:
        if element.raw:
            return self.raws.memory(element.raw)
        assert element.layer
        return await self._blocks.open_stack(element.blocks, [(element.layer, 0)], holder, MEMORY)

    async def _runs_of(self, element: Element) -> bytes:
        if element.raw:
            return await asyncio.to_thread(self.raws.read_runs, element.raw)
        assert element.layer
        if element.layer not in self._runs:
            table = await self._layers.table(element.layer)
            self._runs[element.layer] = _core.layer_runs(table)
        return self._runs[element.layer]

    def adopt(self, snapshot_id: str, holder: str) -> None:
        """A machine found again has the snapshot's files open."""
        if manifest := self._known.get(snapshot_id):
            for raw in manifest.raws:
                self.raws.use(raw, holder)
        self.has_open(holder)  # of its disks it needs no names

    def has_open(self, holder: str) -> None:
        """The machine runs: it has opened what it was given."""
        self.raws.has_open(holder)
        self.tidy()

    def release(self, holder: str) -> None:
        """What the machine had open may go, if nothing else needs it."""
        self.raws.release(holder)
        self.tidy()

    def tidy(self) -> None:
        """Have what nobody needs any more removed, soon; by one who knows what is needed."""
        if not self._started:
            return
        self._untidy = True
        if self._tidying is None or self._tidying.done():
            self._tidying = self._tasks.start(self._tidy(), "tidy snapshots")

    async def _tidy(self) -> None:
        while self._untidy:  # asked meanwhile: what was looked at may be needed no more
            await asyncio.sleep(0)  # all who end at once
            self._untidy = False
            await self._tidy_once()

    async def _tidy_once(self) -> None:
        try:
            needed = await self._records.needed_snapshots() | self._held.keys()
            for manifest in [m for m in self._known.values() if m.id not in needed]:
                if not self._storing.lends(manifest):
                    await self._forget(manifest)
            for damaged in self._damaged - needed:
                await self._forget_damaged(damaged)
            if not self._damaged:  # nobody knows which files those need
                await self.raws.sweep(self._raws_needed)
        except AgentEnvError as error:
            log.warning("snapshots are not tidied now: %s", error.message)

    def _raws_needed(self) -> set[str]:
        return {raw for manifest in self._known.values() for raw in manifest.raws}

    async def _forget_damaged(self, snapshot_id: str) -> None:
        if await self._records.drop_snapshot(snapshot_id):
            self._damaged.discard(snapshot_id)
            with contextlib.suppress(InfraError):
                await self._claims.drop(snapshot_id, CLAIM)

    async def _forget(self, manifest: Manifest) -> None:
        if manifest.id in self._held or not await self._records.drop_snapshot(manifest.id):
            return
        self._known.pop(manifest.id, None)
        self._storing.forget(manifest)
        with contextlib.suppress(InfraError):  # else the next start drops it
            await self._claims.drop(manifest.id, CLAIM)
        layers = {layer for each in self._known.values() for layer in each.layers}
        for layer in manifest.layers - layers:
            self._runs.pop(layer, None)
            self._sizes.pop(layer, None)
