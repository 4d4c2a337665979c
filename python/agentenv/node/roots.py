"""What sandboxes read: images and blank disks as files of the block server.

What a start reads first is remembered in the store (``first-use/IMAGE``), so that the next node
has it fetched at once, not one miss after another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from agentenv.concurrency import KeyedLocks
from agentenv.engine.contract import FlatSource
from agentenv.engine.qemu import disk
from agentenv.errors import AgentEnvError, ImageError, InfraError, faults
from agentenv.layer.blockd import DISK, MEMORY, BlockClient
from agentenv.layer.catalog import ImageCatalog, first_use_key
from agentenv.layer.layers import BLOCK, DISK_WINDOW, Layers, Part, named
from agentenv.store import lease as leases
from agentenv.store.claims import Claims

log = logging.getLogger(__name__)

BLANK = 1  # version of how blanks are made: another one makes other layers
MAX_FIRST_USE = 16 << 20
_FIRST_USE = TypeAdapter(dict[str, list[tuple[NonNegativeInt, NonNegativeInt]]])


class Roots:
    """Holders are ids of sandboxes; what one holds stays open until ``release``.

    ``notes`` is a folder for what is known of the store at the URL ``store``.
    """

    def __init__(
        self,
        catalog: ImageCatalog,
        layers: Layers,
        claims: Claims,
        blocks: BlockClient,
        *,
        notes: Path,
        store: str,
    ) -> None:
        self._catalog, self._layers = catalog, layers
        self._notes, self._store = notes, store
        self._claims, self._blocks = claims, blocks
        self._blanks: dict[int, Part] = {}
        self._making = KeyedLocks()
        self._first_uses: dict[str, dict[str, list[tuple[int, int]]] | None] = {}

    async def image(self, image_id: str, holder: str, *, whole: bool = False) -> FlatSource:
        """The flat image, part by part (parts are shared by all images that hold them), or as one
        file for the host to mount, whose reads wait for the store.

        Raises NotFound, ImageError, InfraError.
        """
        image = await self._catalog.find(image_id)
        parts = [part for part in image.parts if part.layer is not None]
        groups = [image.parts] if whole else [[part] for part in parts]
        kind = MEMORY if whole else DISK
        opening = (self._blocks.open(group, holder, kind) for group in groups)
        files = tuple(await asyncio.gather(*opening))
        await self._prefetch(image_id, files)
        return FlatSource(files)

    async def _prefetch(self, image_id: str, files: tuple[Path, ...]) -> None:
        """A help, no condition: what cannot be looked up is read when it is needed."""
        try:
            known = await self._first_use(image_id)
            for path in files:
                if known and (chunks := known.get(path.name)):
                    await self._blocks.prefetch(path, chunks)
        except InfraError as error:
            log.warning("nothing is fetched ahead for image %s: %s", image_id, error.message)

    async def blank(self, size_mib: int) -> Part:
        """The layer that is a blank disk of this size. Raises InfraError."""
        async with self._making.hold(str(size_mib)):
            part = self._blanks.get(size_mib)
            if part is None:
                part = self._remembered(size_mib) or await self._make_blank(size_mib)
                self._blanks[size_mib] = part
            return part

    async def open_blank(self, size_mib: int, holder: str) -> Path:
        """A blank disk of this size."""
        part = await self.blank(size_mib)
        try:
            return await self._blocks.open([part], holder)
        except ImageError:  # the store lost it
            async with self._making.hold(str(size_mib)):
                part = self._blanks[size_mib] = await self._make_blank(size_mib)
        return await self._blocks.open([part], holder)

    def _remembered(self, size_mib: int) -> Part | None:
        """So that a node whose store is away can use what it has."""
        try:
            doc = json.loads(self._note(size_mib).read_text())
            return Part(doc["layer"], doc["blocks"])
        except (OSError, ValueError, KeyError):
            return None

    def _note(self, size_mib: int) -> Path:
        return self._notes / f"blank-{size_mib}-{named(self._store)[:16]}.json"

    async def _make_blank(self, size_mib: int) -> Part:
        name = named(f"blank {BLANK} {size_mib}")
        async with leases.hold(self._layers.objects) as lease:
            part = await self._layers.source(name, lease)
            async with self._layers.drafts.draft() as draft:
                if part is None:
                    await disk.make_blank(draft.path, size_mib)
                    blocks = (size_mib << 20) // BLOCK
                    spans = disk.data_spans(draft.path)
                    part = await self._layers.write(draft.path, spans, blocks, DISK_WINDOW, lease)
                    await self._layers.put_source(name, part, lease)
                else:  # little, and read bit by bit for as long as a sandbox writes
                    await self._layers.unpack([part], draft.path)
                    os.truncate(draft.path, size_mib << 20)
                await self._layers.keep_here(part, draft.path)
            lease.check()
            keys = [f"layer/{part.layer}", f"source/{name}"]
            await self._claims.put(f"blank-{size_mib}", keys, kind="disk")
        with faults("the blank disk could not be noted"):
            self._note(size_mib).write_text(json.dumps(asdict(part)))
        return part

    async def release(self, holder: str) -> None:
        await self._blocks.close(holder)

    async def keep_only(self, holders: set[str]) -> None:
        await self._blocks.keep_only(holders)

    async def _first_use(self, image_id: str) -> dict[str, list[tuple[int, int]]] | None:
        if image_id not in self._first_uses:
            data = await self._layers.objects.get(first_use_key(image_id), MAX_FIRST_USE)
            self._first_uses[image_id] = (_chunks(data) if data else None) or None
        return self._first_uses[image_id]

    async def learn_first_use(self, image_id: str, root: FlatSource) -> None:
        """Remember what has been read of an image so far, unless somebody did before.

        Nothing that a sandbox depends on: a failure is logged.
        """
        try:
            if await self._first_use(image_id) is not None:
                return
            found = {path.name: await self._blocks.first_use(path) for path in root.segments}
            found = {name: chunks for name, chunks in found.items() if chunks}
            if not found:
                return  # all of it was here: the kernel read it by itself
            data = json.dumps(found)
            await self._layers.objects.put(first_use_key(image_id), data.encode())
            self._first_uses.pop(image_id)
        except AgentEnvError as error:
            log.warning("first reads of image %s are not remembered: %s", image_id, error.message)


def _chunks(data: bytes) -> dict[str, list[tuple[int, int]]]:
    """Chunks by stack; empty if the store holds something else there."""
    try:
        return _FIRST_USE.validate_json(data)
    except ValidationError:
        return {}
