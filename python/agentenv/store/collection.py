"""The collection: mark from claims, sweep the rest, compact packs that are mostly dead.

Works beside writers on any node (``store.lease`` says how) and may be killed anywhere: marks and
objects that are left are found the next time. A layer's table may move to another pack; who holds
an old table finds the pack gone and reads the table again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentenv.errors import InfraError
from agentenv.store import lease as leases
from agentenv.store.chunks import Chunks
from agentenv.store.claims import all_claims
from agentenv.store.drafts import Drafts
from agentenv.store.lease import CONDEMNED
from agentenv.store.objects import CoreObjects, Entry

if TYPE_CHECKING:
    from agentenv import _core

KINDS = ("first-use/", "image/", "layer/", "pack/", "snapshot/", "source/", "tree/")
MAX_TABLE = 1 << 30
# A pack is rewritten when less than this part of its bytes is in use.
WORTH_KEEPING = 0.5
# Objects marked at once: writers that need one of them wait until they are swept.
BATCH = 500


@dataclass(slots=True)
class Collected:
    """Keys. ``kept`` is referenced by nothing, but a writer uses it."""

    deleted: list[str] = field(default_factory=list[str])
    deleted_bytes: int = 0
    kept: list[str] = field(default_factory=list[str])
    compacted: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Live:
    """What claims reach: keys, and of each pack the chunks in use by id."""

    keys: set[str]
    layers: dict[str, _core.Layer] = field(default_factory=dict[str, "_core.Layer"])
    packs: dict[str, dict[bytes, _core.Chunk]] = field(
        default_factory=dict[str, dict[bytes, "_core.Chunk"]]
    )


class Collection:
    """``chunks`` is this home's index, which is told of what goes."""

    def __init__(self, objects: CoreObjects, chunks: Chunks, drafts: Drafts) -> None:
        self._objects, self._chunks, self._drafts = objects, chunks, drafts

    async def run(self, *, dry: bool = False) -> Collected:
        """``dry`` tells what would be marked and deleted, and changes nothing.

        Raises InfraError; what was done by then stays done and is right.
        """
        done = Collected()
        if dry:
            self._note(done, self._dead(await self._there(), await self.mark()))
            return done
        await self._objects.sweep_drafts()
        try:
            await self._run(done)
        except InfraError as error:
            if error.code != "disk_full" or not await self._make_room(done):
                raise
            await self._run(done)
        return done

    async def _make_room(self, done: Collected) -> bool:
        """Delete the largest dead pack of a full store, where no mark can be made: as long as it is
        full nobody can begin to write either, and who began before is asked for."""
        live = (await self.mark()).keys
        in_use = await leases.used(self._objects, 0.0)
        packs = await self._objects.list("pack/")
        dead = [entry for entry in packs if entry.key not in live | in_use]
        for entry in sorted(dead, key=lambda entry: -entry.size)[:1]:
            await self._chunks.drop_packs([entry.key.partition("/")[2]])
            await self._objects.delete([entry.key])
            self._note(done, [entry])
        return bool(dead)

    async def _run(self, done: Collected) -> None:
        async with leases.hold(self._objects) as lease:
            live = await self.mark()
            done.compacted = await self._compact(live, lease)
        async with leases.hold(self._objects) as lease:
            await self._forget_marks(await lease.now())
            dead = self._dead(await self._there(), await self.mark() if done.compacted else live)
            for start in range(0, len(dead), BATCH):
                await self._sweep(dead[start : start + BATCH], lease, done)

    @staticmethod
    def _dead(there: dict[str, Entry], live: Live) -> list[Entry]:
        return [entry for key, entry in sorted(there.items()) if key not in live.keys]

    async def _there(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for kind in KINDS:
            found.update({entry.key: entry for entry in await self._objects.list(kind)})
        return found

    async def mark(self) -> Live:
        """What must stay. Raises InfraError if a claim or a claimed table cannot be read."""
        claims = await all_claims(self._objects)
        live = Live({key for keys in claims.values() for key in keys})
        for key in sorted(live.keys):
            if not key.startswith("layer/"):
                continue
            table = await self.table(key)
            if table is None:
                continue  # lost already: nothing of it can be kept
            live.layers[key] = table
            live.keys.update(f"pack/{pack}" for pack in table.packs)
            for chunk in table.chunks():
                live.packs.setdefault(chunk[4], {})[chunk[0]] = chunk
        return live

    async def table(self, key: str) -> _core.Layer | None:
        from agentenv import _core

        data = await self._objects.get(key, MAX_TABLE)
        try:
            return _core.Layer.decode(data) if data is not None else None
        except ValueError as error:
            raise InfraError(
                f"{key} is damaged, so what it needs is not known",
                why=str(error),
                fix="remove the images that need it (aenv store verify names them)",
                code="store_damaged",
            ) from error

    async def _sweep(self, dead: list[Entry], lease: leases.Lease, done: Collected) -> None:
        """Mark, look who uses what is marked and whether it is claimed by now, delete the rest."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        marks = [CONDEMNED + entry.key for entry in dead]
        try:
            for mark in marks:
                await self._objects.put(mark, leases.own_process())
            in_use = await leases.used(self._objects, await lease.now())
            live = (await self.mark()).keys
            ripe = [entry for entry in dead if entry.key not in live | in_use]
            packs = (e.key.partition("/")[2] for e in ripe if e.key.startswith("pack/"))
            await self._chunks.drop_packs(packs)
            if loop.time() - begun > leases.MARK_LIFETIME / 3:
                ripe = []  # writers will not respect the marks much longer
            await self._objects.delete([entry.key for entry in ripe])
            self._note(done, ripe)
            done.kept += [entry.key for entry in dead if entry.key in in_use]
        finally:
            await self._objects.delete(marks)

    @staticmethod
    def _note(done: Collected, deleted: list[Entry]) -> None:
        done.deleted += [entry.key for entry in deleted]
        done.deleted_bytes += sum(entry.size for entry in deleted)

    async def _forget_marks(self, now: float) -> None:
        """Those that a collection left which was killed."""
        left: list[str] = []
        for entry in await self._objects.list(CONDEMNED):
            owner = await self._objects.get(entry.key, leases.MAX_OWNER) or b""
            if now - entry.modified > leases.MARK_LIFETIME or leases.died_here(owner):
                left.append(entry.key)
        await self._objects.delete(left)

    async def _compact(self, live: Live, lease: leases.Lease) -> list[str]:
        """Copy what is in use out of packs that are mostly dead; they are unreferenced then."""
        sizes = {entry.key: entry.size for entry in await self._objects.list("pack/")}
        sparse = [
            pack
            for pack, chunks in sorted(live.packs.items())
            if sum(chunk[1] for chunk in chunks.values())
            < WORTH_KEEPING * sizes.get(f"pack/{pack}", 0)
        ]
        done: list[str] = []
        for pack in sparse:
            try:
                await self._rewrite(pack, live, lease)
            except InfraError as error:
                if error.code != "disk_full":
                    raise
                break  # no room to make room this way
            done.append(pack)
        return done

    async def _rewrite(self, pack: str, live: Live, lease: leases.Lease) -> None:
        from agentenv import _core

        chunks = sorted(live.packs[pack].values(), key=lambda chunk: chunk[5])
        await lease.use([f"pack/{pack}"])
        async with self._drafts.draft() as draft:
            new, _, moved = await self._objects.with_core(_core.repack, chunks, draft.path)
            await lease.use([f"pack/{new}"])
            await self._objects.put_file(f"pack/{new}", draft.path)
        for key in live.layers:
            await self._move(key, pack, moved, lease)
        await self._chunks.add_pack(new, moved)

    async def _move(
        self, key: str, pack: str, moved: list[_core.Chunk], lease: leases.Lease
    ) -> None:
        """Have a layer's table name the new places, with what another collection did meanwhile."""
        table = await self.table(key)
        while table is not None and pack in table.packs:
            packs = table.packs
            await lease.use([key, *(f"pack/{each}" for each in packs)])
            table = await self.table(key)
            if table is not None and table.packs == packs:
                lease.check()
                await self._objects.put(key, table.moved(moved).encode())
                return
