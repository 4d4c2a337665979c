"""Records in an SQL database through SQLAlchemy: SQLite now, PostgreSQL by the same code.

SQLite runs in WAL mode with ``synchronous=FULL``: what was acknowledged survives a power cut,
and the CLI may read and write the same file while the server runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Table, delete, event, insert, select, update
from sqlalchemy.engine import Row
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from agentenv.errors import Conflict, InfraError
from agentenv.store import tables as t
from agentenv.store.chunks import SqlChunks
from agentenv.store.records import BuildRow, ImageRow, SandboxRow, SnapshotRow, TemplateRow
from agentenv.store.steps import SqlSteps

FULL = "disk is full"  # SQLite's words
LOCKED, LOCKED_POLL = "database is locked", 0.02  # SQLite's words; seconds
BUSY_TIMEOUT = 30.0  # seconds a writer waits for another process's transaction
# A slot of a sandbox in one of these states has been given back.
GONE_STATES = ("ended",)
_LIVE = t.sandboxes.c.state.not_in(GONE_STATES)
_SNAPSHOT_USERS = (
    select(t.kept_steps.c.snapshot_id),
    select(t.builds.c.snapshot_id).where(t.builds.c.snapshot_id.is_not(None)),
    select(t.sandboxes.c.snapshot_id).where(t.sandboxes.c.snapshot_id.is_not(None), _LIVE),
    select(t.sandboxes.c.disk_id).where(t.sandboxes.c.disk_id.is_not(None), _LIVE),
)


class SqlRecords:
    """Implements ``Records``."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @classmethod
    async def open_sqlite(cls, path: Path) -> SqlRecords:
        """Open or create the database at ``path`` (its folder must exist)."""
        engine = create_async_engine(
            f"sqlite+aiosqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT}
        )
        event.listen(engine.sync_engine, "connect", _sqlite_pragmas)
        event.listen(engine.sync_engine, "begin", _begin_immediate)
        records = cls(engine)
        try:
            await records._prepare()
        except BaseException:
            await engine.dispose()
            raise
        return records

    async def _prepare(self) -> None:
        """The switch to WAL does not wait for another process's lock as transactions do, and two
        that open a fresh database meet there: so it is tried until the same time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BUSY_TIMEOUT
        while True:
            try:
                return await self._create_schema()
            except InfraError as error:
                if LOCKED not in error.why or loop.time() > deadline:
                    raise
            await asyncio.sleep(LOCKED_POLL)

    async def _create_schema(self) -> None:
        async with self._transaction() as db:
            await db.run_sync(t.metadata.create_all)
            version = (await db.execute(select(t.schema.c.version))).scalar()
            if version is None:
                await db.execute(insert(t.schema).values(version=t.SCHEMA_VERSION))
            elif version != t.SCHEMA_VERSION:
                raise InfraError(
                    f"the state database has format {version}, not {t.SCHEMA_VERSION}",
                    fix="use the AgentENV version that wrote it, or another --home",
                    code="state_format",
                )

    async def close(self) -> None:
        await self._engine.dispose()

    @property
    def chunks(self) -> SqlChunks:
        """The index of the store's chunks in the same database."""
        return SqlChunks(self._transaction)

    @property
    def steps(self) -> SqlSteps:
        """What builds keep, in the same database."""
        return SqlSteps(self._transaction)

    @asynccontextmanager
    async def _transaction(self) -> AsyncGenerator[AsyncConnection]:
        try:
            async with self._engine.begin() as db:
                yield db
        except IntegrityError:
            raise
        except DBAPIError as error:
            if FULL in str(error.orig):
                raise InfraError(
                    "the state database could not be written",
                    why="no space is left on the disk",
                    fix="free some: aenv image rm, aenv store gc",
                    code="disk_full",
                    http_status=507,
                ) from error
            raise InfraError(
                "the state database failed", why=str(error.orig), code="state_store"
            ) from error

    # Images

    async def put_image(self, row: ImageRow) -> None:
        async with self._transaction() as db:
            await _replace(
                db,
                t.images,
                id=row.id,
                reference=row.reference,
                digest=row.digest,
                created=_text(row.created),
                doc=row.doc,
            )

    async def image(self, key: str) -> ImageRow | None:
        found = await self._images((t.images.c.id == key) | (t.images.c.reference == key))
        return found[0] if found else None

    async def images(self) -> list[ImageRow]:
        return await self._images()

    async def _images(self, *where: Any) -> list[ImageRow]:
        async with self._transaction() as db:
            rows = await db.execute(
                select(t.images).where(*where).order_by(t.images.c.created.desc())
            )
            return [ImageRow(r.id, r.reference, r.digest, _time(r.created), r.doc) for r in rows]

    async def drop_image(self, image_id: str) -> None:
        async with self._transaction() as db:
            in_build = select(t.builds.c.id).where(t.builds.c.image_id == image_id)
            in_snapshot = select(t.snapshots.c.id).where(t.snapshots.c.image_id == image_id)
            in_sandbox = select(t.sandboxes.c.id).where(
                t.sandboxes.c.image_id == image_id, t.sandboxes.c.state.not_in(GONE_STATES)
            )
            users = (("template", in_build), ("snapshot", in_snapshot), ("sandbox", in_sandbox))
            for what, query in users:
                if (user := (await db.execute(query)).scalar()) is not None:
                    raise Conflict(
                        f"image {image_id} is in use by {what} {user}",
                        fix=f"remove the {what} first",
                        code="image_in_use",
                    )
            await db.execute(delete(t.images).where(t.images.c.id == image_id))

    # Templates and builds

    async def put_template(self, row: TemplateRow) -> None:
        async with self._transaction() as db:
            taken = select(t.template_names.c.name).where(
                t.template_names.c.name.in_(row.names), t.template_names.c.template_id != row.id
            )
            if (name := (await db.execute(taken)).scalar()) is not None:
                raise Conflict(f"the name {name} is another template's", code="name_taken")
            await _replace(
                db, t.templates, id=row.id, created=_text(row.created), public=int(row.public)
            )
            for table in (t.template_names, t.template_tags):
                await db.execute(delete(table).where(table.c.template_id == row.id))
            for position, name in enumerate(row.names):
                values = {"name": name, "template_id": row.id, "position": position}
                await db.execute(insert(t.template_names).values(**values))
            for tag, build_id in row.tags.items():
                values = {"template_id": row.id, "tag": tag, "build_id": build_id}
                await db.execute(insert(t.template_tags).values(**values))

    async def template(self, key: str) -> TemplateRow | None:
        named = select(t.template_names.c.template_id).where(t.template_names.c.name == key)
        found = await self._templates((t.templates.c.id == key) | t.templates.c.id.in_(named))
        return found[0] if found else None

    async def templates(self) -> list[TemplateRow]:
        return await self._templates()

    async def _templates(self, *where: Any) -> list[TemplateRow]:
        async with self._transaction() as db:
            rows = await db.execute(
                select(t.templates).where(*where).order_by(t.templates.c.created.desc())
            )
            chosen = select(t.templates.c.id).where(*where)
            names = await db.execute(
                select(t.template_names)
                .where(t.template_names.c.template_id.in_(chosen))
                .order_by(t.template_names.c.position)
            )
            tags = await db.execute(
                select(t.template_tags).where(t.template_tags.c.template_id.in_(chosen))
            )
            names_of: dict[str, list[str]] = {}
            for r in names:
                names_of.setdefault(r.template_id, []).append(r.name)
            tags_of: dict[str, dict[str, str]] = {}
            for r in tags:
                tags_of.setdefault(r.template_id, {})[r.tag] = r.build_id
            return [
                TemplateRow(
                    r.id,
                    tuple(names_of.get(r.id, ())),
                    tags_of.get(r.id, {}),
                    _time(r.created),
                    bool(r.public),
                )
                for r in rows
            ]

    async def drop_template(self, template_id: str) -> None:
        async with self._transaction() as db:
            await db.execute(delete(t.templates).where(t.templates.c.id == template_id))

    async def put_build(self, row: BuildRow, tags: Sequence[str] = ()) -> None:
        async with self._transaction() as db:
            await _put_build(db, row, tags)

    async def add_build(
        self, row: BuildRow, name: str | None, tags: Sequence[str] = ()
    ) -> BuildRow:
        async with self._transaction() as db:
            named = select(t.template_names.c.template_id).where(t.template_names.c.name == name)
            template_id = (await db.execute(named)).scalar()
            if template_id is None:
                template_id = row.template_id
                values = {"id": template_id, "created": _text(row.created), "public": 0}
                await db.execute(insert(t.templates).values(**values))
                if name is not None:
                    values = {"name": name, "template_id": template_id, "position": 0}
                    await db.execute(insert(t.template_names).values(**values))
            row = replace(row, template_id=template_id)
            await _put_build(db, row, tags)
        return row

    async def build(self, build_id: str) -> BuildRow | None:
        async with self._transaction() as db:
            r = (await db.execute(select(t.builds).where(t.builds.c.id == build_id))).first()
            return _build(r) if r else None

    async def builds(
        self, template_id: str | None = None, *, status: str | None = None
    ) -> list[BuildRow]:
        query = select(t.builds).order_by(t.builds.c.created.desc(), t.builds.c.id)
        if template_id is not None:
            query = query.where(t.builds.c.template_id == template_id)
        if status is not None:
            query = query.where(t.builds.c.status == status)
        async with self._transaction() as db:
            return [_build(r) for r in await db.execute(query)]

    async def drop_build(self, build_id: str) -> None:
        async with self._transaction() as db:
            await db.execute(delete(t.builds).where(t.builds.c.id == build_id))

    # Snapshots

    async def put_snapshot(self, row: SnapshotRow, sandbox: SandboxRow | None = None) -> None:
        async with self._transaction() as db:
            await _replace(
                db,
                t.snapshots,
                id=row.id,
                parent=row.parent,
                sandbox_id=row.sandbox_id,
                image_id=row.image_id,
                created=_text(row.created),
                doc=row.doc,
            )
            if sandbox is not None:
                await _put_sandbox(db, sandbox)

    async def snapshot(self, snapshot_id: str) -> SnapshotRow | None:
        found = await self._snapshots(t.snapshots.c.id == snapshot_id)
        return found[0] if found else None

    async def snapshots(self) -> list[SnapshotRow]:
        return await self._snapshots()

    async def _snapshots(self, *where: Any) -> list[SnapshotRow]:
        async with self._transaction() as db:
            query = select(t.snapshots).where(*where).order_by(t.snapshots.c.created)
            return [
                SnapshotRow(r.id, r.parent, r.sandbox_id, r.image_id, _time(r.created), r.doc)
                for r in await db.execute(query)
            ]

    async def needed_snapshots(self) -> set[str]:
        async with self._transaction() as db:
            return {id for query in _SNAPSHOT_USERS for id in (await db.execute(query)).scalars()}

    async def drop_snapshot(self, snapshot_id: str) -> bool:
        async with self._transaction() as db:
            for query in _SNAPSHOT_USERS:
                (column,) = query.selected_columns
                if (await db.execute(query.where(column == snapshot_id).limit(1))).first():
                    return False
            await db.execute(delete(t.snapshots).where(t.snapshots.c.id == snapshot_id))
            return True

    # Sandboxes

    async def put_sandbox(self, row: SandboxRow) -> None:
        async with self._transaction() as db:
            await _put_sandbox(db, row)

    async def sandbox(self, sandbox_id: str) -> SandboxRow | None:
        async with self._transaction() as db:
            query = select(t.sandboxes).where(t.sandboxes.c.id == sandbox_id)
            r = (await db.execute(query)).first()
            return _sandbox(r) if r else None

    async def sandboxes(self) -> list[SandboxRow]:
        async with self._transaction() as db:
            query = select(t.sandboxes).order_by(t.sandboxes.c.started_at.desc())
            return [_sandbox(r) for r in await db.execute(query)]

    async def drop_sandbox(self, sandbox_id: str) -> None:
        async with self._transaction() as db:
            await db.execute(delete(t.sandboxes).where(t.sandboxes.c.id == sandbox_id))


async def _put_build(db: AsyncConnection, row: BuildRow, tags: Sequence[str]) -> None:
    await _replace(db, t.builds, **{**asdict(row), "created": _text(row.created)})
    table = t.template_tags
    of_template = table.c.template_id == row.template_id
    await db.execute(delete(table).where(of_template, table.c.tag.in_(tags)))
    for tag in tags:
        values = {"template_id": row.template_id, "tag": tag, "build_id": row.id}
        await db.execute(insert(table).values(**values))


async def _put_sandbox(db: AsyncConnection, row: SandboxRow) -> None:
    await _replace(
        db,
        t.sandboxes,
        id=row.id,
        state=row.state,
        template_id=row.template_id,
        build_id=row.build_id,
        image_id=row.image_id,
        snapshot_id=row.snapshot_id,
        disk_id=row.disk_id,
        slot=row.slot,
        started_at=_text(row.started_at),
        end_at=_text(row.end_at),
        metadata=row.metadata,
        doc=row.doc,
    )


async def _replace(db: AsyncConnection, table: Table, **values: Any) -> None:
    """Insert or update by ``id``, in portable SQL."""
    done = await db.execute(update(table).where(table.c.id == values["id"]).values(**values))
    if done.rowcount == 0:
        await db.execute(insert(table).values(**values))


def _build(r: Row[Any]) -> BuildRow:
    return BuildRow(
        r.id, r.template_id, r.image_id, _time(r.created), r.doc, r.snapshot_id, r.status
    )


def _sandbox(r: Row[Any]) -> SandboxRow:
    return SandboxRow(
        r.id,
        r.state,
        r.template_id,
        r.build_id,
        r.image_id,
        r.snapshot_id,
        r.disk_id,
        r.slot,
        _time(r.started_at),
        _time(r.end_at),
        r.metadata,
        r.doc,
    )


def _text(time: datetime) -> str:
    """Fixed width, so that text order is time order."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by us, below
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_immediate(connection: Any) -> None:
    # A deferred transaction that turns into a writer fails at once when another process wrote.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
