"""Block layers in the object store: written once, found by name, read back.

    pack/ID       chunks                           layer/ID   a layer's table
    tree/NAME     what is in an image's layer      source/NAME  what was made of what, as JSON

A ``source`` says which layer came out of an input that is known by its name (an OCI layer's diff
id, a disk's size), so that nobody makes it again. Formats: docs/FORMATS.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from agentenv.concurrency import interruptible
from agentenv.errors import AgentEnvError, ImageError, InfraError, faults
from agentenv.host.files import second_name
from agentenv.store.chunks import Chunks
from agentenv.store.drafts import Draft, Drafts
from agentenv.store.lease import Lease
from agentenv.store.objects import CoreObjects

if TYPE_CHECKING:
    import threading

    from agentenv import _core

log = logging.getLogger(__name__)

BLOCK = 4096
BY_CONTENT = 0  # images: content-defined chunks
DISK_WINDOW = 32  # blocks of a disk's chunk: 128 KiB
# A table has some 52 bytes for 128 KiB of data: this is for layers of 2.5 TiB.
MAX_TABLE = 1 << 30
MAX_TREE = 1 << 30
MAX_SOURCE = 1 << 20
# Packs of other writers read for the index at once; more are left for the next time.
LEARNED_AT_ONCE = 1000

Span = tuple[int, int, int | None]
"""First block, blocks, byte offset in the source; None for zeroes."""


LayerId = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class Part:
    """A layer as part of something: ``layer`` is its id, None if it has no blocks."""

    layer: LayerId | None
    blocks: Annotated[int, Field(ge=0, lt=1 << 32)]


_PART = TypeAdapter(Part)


class Interrupted(Exception):
    """Ends a writer's thread when its task was cancelled."""


class Layers:
    """``cache`` is the block server's folder, where what is made here is kept as well."""

    def __init__(self, objects: CoreObjects, chunks: Chunks, drafts: Drafts, cache: Path) -> None:
        self.objects, self.drafts = objects, drafts
        self._chunks, self._cache = chunks, cache
        self._learning = asyncio.Lock()

    async def write(
        self, source: Path, spans: Sequence[Span], blocks: int, window: int, lease: Lease
    ) -> Part:
        """Store a layer of these spans of ``source``. Equal content gives the same layer.

        Raises InfraError (``disk_full``, ``store_unavailable``, …); what was stored by then is
        the collection's.
        """
        if blocks == 0:
            return Part(None, 0)
        gone: set[str] = set()
        while True:
            async with self.drafts.draft() as pack:
                written = await self._write(source, spans, blocks, window, pack, gone)
                lost = await self._claim(written, lease)
                if not lost:
                    await self._publish(written, pack)
                    return Part(written.layer.id, blocks)
                gone |= lost  # collected since this machine's index learned of them
                await self._chunks.drop_packs(lost)

    async def _write(
        self,
        source: Path,
        spans: Sequence[Span],
        blocks: int,
        window: int,
        pack: Draft,
        gone: set[str],
    ) -> _core.WrittenLayer:
        from agentenv import _core

        loop = asyncio.get_running_loop()

        def work(stop: threading.Event) -> _core.WrittenLayer:
            def known(ids: list[bytes]) -> list[_core.Chunk | None]:
                if stop.is_set():
                    raise Interrupted
                asked = asyncio.run_coroutine_threadsafe(self._chunks.find(ids), loop)
                found = asked.result()
                places = (found.get(key) for key in ids)
                return [None if place and place[4] in gone else place for place in places]

            with faults("the layer could not be written"):
                return _core.write_layer(source, blocks, spans, window, known, pack.path)

        return await interruptible(work)

    async def _claim(self, written: _core.WrittenLayer, lease: Lease) -> set[str]:
        """Use what the layer counts on and consists of; packs of others that are not there."""
        own = written.pack[0] if written.pack else None
        packs = set(written.layer.packs)  # its own among them: every new chunk is the layer's
        await lease.use([f"layer/{written.layer.id}", *(f"pack/{pack}" for pack in packs)])
        heads = {pack: await self.objects.head(f"pack/{pack}") for pack in packs - {own}}
        return {pack for pack, head in heads.items() if head is None}

    async def _publish(self, written: _core.WrittenLayer, draft: Draft) -> None:
        layer = written.layer
        if written.pack:
            key = f"pack/{written.pack[0]}"
            there = await self.objects.head(key)
            if there is None or there.size != written.pack[1]:
                await self.objects.put_file(key, draft.path)
        await self.objects.put(f"layer/{layer.id}", layer.encode())
        if written.pack:
            pack = written.pack[0]
            await self._chunks.add_pack(pack, [c for c in layer.chunks() if c[4] == pack])

    async def keep_here(self, part: Part, path: Path) -> None:
        """Have the block server find the file at ``path``, the blocks of the whole layer, here."""
        if part.layer is None:
            return
        table = await self.objects.get(f"layer/{part.layer}", MAX_TABLE)
        place = self._cache / part.layer[:2] / part.layer
        if table is None or place.with_suffix(".data").exists():
            return
        try:
            await asyncio.to_thread(second_name, path, place.with_suffix(".data"))
            with faults("the cache could not be written"):
                place.with_suffix(".table").write_bytes(table)
                place.with_suffix(".whole").touch()
        except InfraError as error:  # a favour: the store has it
            log.warning("layer %s is not kept here: %s", part.layer, error.message)

    async def learn(self) -> None:
        """Let the index know of packs that others wrote, so that their chunks are referenced."""
        from agentenv import _core

        async with self._learning:
            known = await self._chunks.packs()
            entries = {e.key.partition("/")[2]: e.size for e in await self.objects.list("pack/")}
            if gone := known - entries.keys():
                await self._chunks.drop_packs(gone)
            for pack in sorted(entries.keys() - known)[:LEARNED_AT_ONCE]:
                try:
                    found = await self.objects.with_core(_core.pack_chunks, pack, entries[pack])
                except AgentEnvError:
                    continue  # damaged, or collected just now: not to be counted on
                await self._chunks.add_pack(pack, found)

    async def table(self, layer: str) -> _core.Layer:
        """Raises ImageError (``image_incomplete``, ``layer_damaged``), InfraError."""
        from agentenv import _core

        data = await self.objects.get(f"layer/{layer}", MAX_TABLE)
        if data is None:
            raise missing(f"layer/{layer}")
        try:
            table = _core.Layer.decode(data)
        except ValueError as error:
            raise damaged(f"layer/{layer}", str(error)) from error
        if table.id != layer:
            raise damaged(f"layer/{layer}", "it is another layer")
        return table

    async def unpack(self, parts: Sequence[Part], path: Path) -> None:
        """The parts side by side, from the store, as one flat file. Raises as ``table``."""
        from agentenv import _core

        at = 0
        for part in parts:
            if part.layer is not None:
                await self.objects.with_core(
                    _core.unpack_layer, await self.table(part.layer), path, at
                )
            at += part.blocks

    async def tree(self, name: str) -> bytes:
        """What is in an image's layer (``layer.tree``)."""
        data = await self.objects.get(f"tree/{name}", MAX_TREE)
        if data is None:
            raise missing(f"tree/{name}")
        return data

    async def source(self, name: str, lease: Lease) -> Part | None:
        """The layer that was made of this input, if all of it is there; it stays from now on."""
        key = f"source/{name}"
        await lease.use([key, f"tree/{name}"])
        data = await self.objects.get(key, MAX_SOURCE)
        if data is None:
            return None
        try:
            part = _PART.validate_json(data)
        except ValidationError:
            return None  # of another version, or damaged: made again
        return part if part.layer is None or await self.stays(part.layer, lease) else None

    async def stays(self, layer: str, lease: Lease) -> bool:
        """Whether a layer is there with all its packs; they stay from now on."""
        await lease.use([f"layer/{layer}"])
        try:
            packs = (await self.table(layer)).packs
        except (ImageError, InfraError) as error:
            if error.code not in ("image_incomplete", "layer_damaged"):
                raise
            return False
        await lease.use(f"pack/{pack}" for pack in packs)
        heads = [await self.objects.head(f"pack/{pack}") for pack in packs]
        # A collection may have moved chunks meanwhile: then other packs count.
        return all(heads) and (await self.table(layer)).packs == packs

    async def discard(self, keys: Sequence[str]) -> None:
        """Remove objects that are damaged, and what is known of them here."""
        packs = [key.removeprefix("pack/") for key in keys if key.startswith("pack/")]
        await self._chunks.drop_packs(packs)
        await self.objects.delete(keys)

    async def put_source(self, name: str, part: Part, lease: Lease) -> None:
        key = f"source/{name}"
        await lease.use([key])
        doc = {"layer": part.layer, "blocks": part.blocks}
        await self.objects.put(key, json.dumps(doc).encode())


def named(text: str) -> str:
    """The name of an input: hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def missing(key: str) -> ImageError:
    return ImageError(
        "a part of the image is missing from the store",
        why=f"no object {key}",
        fix="pull it again",
        code="image_incomplete",
    )


def damaged(key: str, why: str) -> InfraError:
    return InfraError(
        "a stored layer cannot be read",
        why=f"{key}: {why}",
        fix="aenv store verify --discard, then pull the image again",
        code="layer_damaged",
    )
