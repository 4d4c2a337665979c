"""The index of chunks: which the store has, and where. Writers ask it, so that what is there is
referenced and not stored again. It is no truth: packs list what they hold (docs/FORMATS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from agentenv.store import tables as t

if TYPE_CHECKING:
    from agentenv._core import Chunk

# Rows of one statement: SQLite takes 32766 variables.
ROWS = 4096


class Chunks(Protocol):
    """Every call is one transaction. InfraError: the database failed."""

    async def find(self, ids: Sequence[bytes]) -> dict[bytes, Chunk]:
        """The chunks among ``ids`` that are known."""
        ...

    async def add_pack(self, pack: str, chunks: Iterable[Chunk]) -> None:
        """Chunks of a pack; a chunk known elsewhere is from now on known here."""
        ...

    async def packs(self) -> set[str]: ...

    async def drop_packs(self, packs: Iterable[str]) -> None:
        """With their chunks. Unknown is success."""
        ...


class SqlChunks:
    """Implements ``Chunks``."""

    def __init__(
        self, transaction: Callable[[], AbstractAsyncContextManager[AsyncConnection]]
    ) -> None:
        self._transaction = transaction

    async def find(self, ids: Sequence[bytes]) -> dict[bytes, Chunk]:
        c = t.chunks.c
        columns = (c.id, c.stored, c.blocks, c.codec, t.packs.c.id, c.offset)
        found: dict[bytes, Chunk] = {}
        async with self._transaction() as db:
            for start in range(0, len(ids), ROWS):
                wanted = c.id.in_(ids[start : start + ROWS])
                for row in await db.execute(select(*columns).join(t.packs).where(wanted)):
                    found[row[0]] = (row[0], row[1], row[2], row[3], row[4], row[5])
        return found

    async def add_pack(self, pack: str, chunks: Iterable[Chunk]) -> None:
        rows = list({chunk[0]: chunk for chunk in chunks}.values())
        async with self._transaction() as db:
            number = (
                await db.execute(select(t.packs.c.number).where(t.packs.c.id == pack))
            ).scalar()
            if number is None:
                done = await db.execute(insert(t.packs).values(id=pack))
                assert done.inserted_primary_key
                number = done.inserted_primary_key[0]
            for start in range(0, len(rows), ROWS):
                part = rows[start : start + ROWS]
                await db.execute(
                    delete(t.chunks).where(t.chunks.c.id.in_([row[0] for row in part]))
                )
                values = [
                    {"id": i, "pack": number, "offset": at, "stored": s, "blocks": b, "codec": k}
                    for i, s, b, k, _, at in part
                ]
                await db.execute(insert(t.chunks), values)

    async def packs(self) -> set[str]:
        async with self._transaction() as db:
            return set((await db.execute(select(t.packs.c.id))).scalars())

    async def drop_packs(self, packs: Iterable[str]) -> None:
        async with self._transaction() as db:
            for pack in packs:
                await db.execute(delete(t.packs).where(t.packs.c.id == pack))
