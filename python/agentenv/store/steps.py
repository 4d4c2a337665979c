"""What builds of templates keep: a snapshot after a step, by the key of the step (`recipe`).

A snapshot that is kept here is needed as one that a template means.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from agentenv.store import tables as t


class Steps(Protocol):
    """Every call is one transaction. InfraError: the database failed."""

    async def keep(self, key: str, snapshot_id: str) -> None:
        """Instead of what was kept under this key."""
        ...

    async def find(self, key: str) -> str | None:
        """The snapshot, which counts as used now."""
        ...

    async def drop(self, snapshot_id: str) -> None:
        """Under all its keys. Unknown is success."""
        ...

    async def trim(self, most: int) -> int:
        """Drop all but those used last; how many were dropped."""
        ...


class SqlSteps:
    """Implements ``Steps``; ``used`` counts up with each use."""

    def __init__(
        self, transaction: Callable[[], AbstractAsyncContextManager[AsyncConnection]]
    ) -> None:
        self._transaction = transaction

    async def keep(self, key: str, snapshot_id: str) -> None:
        async with self._transaction() as db:
            await _put(db, key, snapshot_id)

    async def find(self, key: str) -> str | None:
        async with self._transaction() as db:
            query = select(t.kept_steps.c.snapshot_id).where(t.kept_steps.c.key == key)
            found: str | None = (await db.execute(query)).scalar()
            if found is not None:
                await _put(db, key, found)
            return found

    async def drop(self, snapshot_id: str) -> None:
        table = t.kept_steps
        async with self._transaction() as db:
            await db.execute(delete(table).where(table.c.snapshot_id == snapshot_id))

    async def trim(self, most: int) -> int:
        table = t.kept_steps
        async with self._transaction() as db:
            newest = select(table.c.key).order_by(table.c.used.desc()).limit(most)
            done = await db.execute(delete(table).where(table.c.key.not_in(newest)))
            return done.rowcount


async def _put(db: AsyncConnection, key: str, snapshot_id: str) -> None:
    table = t.kept_steps
    last: int | None = (await db.execute(select(func.max(table.c.used)))).scalar()
    await db.execute(delete(table).where(table.c.key == key))
    values = {"key": key, "snapshot_id": snapshot_id, "used": (last or 0) + 1}
    await db.execute(insert(table).values(**values))
