"""The SQL schema, one for every database. Its version is checked when a store is opened."""

from __future__ import annotations

from sqlalchemy import JSON, Column, ForeignKey, Integer, LargeBinary, MetaData, String, Table

SCHEMA_VERSION = 3

metadata = MetaData()

schema = Table("schema", metadata, Column("version", Integer, primary_key=True))

images = Table(
    "images",
    metadata,
    Column("id", String, primary_key=True),
    Column("reference", String, nullable=False, index=True),
    Column("digest", String, nullable=False),
    Column("created", String, nullable=False),
    Column("doc", JSON, nullable=False),
)

packs = Table(
    "packs",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
)

# Where the store has which chunk: what writers look up, made again from packs at any time.
chunks = Table(
    "chunks",
    metadata,
    Column("id", LargeBinary, primary_key=True),
    Column(
        "pack", Integer, ForeignKey("packs.number", ondelete="CASCADE"), nullable=False, index=True
    ),
    Column("offset", Integer, nullable=False),
    Column("stored", Integer, nullable=False),
    Column("blocks", Integer, nullable=False),
    Column("codec", Integer, nullable=False),
    sqlite_with_rowid=False,
)

templates = Table(
    "templates",
    metadata,
    Column("id", String, primary_key=True),
    Column("created", String, nullable=False),
    Column("public", Integer, nullable=False),
)

template_names = Table(
    "template_names",
    metadata,
    Column("name", String, primary_key=True),
    Column(
        "template_id",
        String,
        ForeignKey("templates.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("position", Integer, nullable=False),
)

template_tags = Table(
    "template_tags",
    metadata,
    Column("template_id", String, ForeignKey("templates.id", ondelete="CASCADE"), primary_key=True),
    Column("tag", String, primary_key=True),
    Column("build_id", String, nullable=False),
)

builds = Table(
    "builds",
    metadata,
    Column("id", String, primary_key=True),
    Column(
        "template_id",
        String,
        ForeignKey("templates.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("image_id", String, ForeignKey("images.id"), index=True),
    Column("snapshot_id", String, ForeignKey("snapshots.id"), index=True),
    Column("status", String, nullable=False),
    Column("created", String, nullable=False),
    Column("doc", JSON, nullable=False),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", String, primary_key=True),
    Column("parent", String),
    Column("sandbox_id", String, nullable=False, index=True),
    Column("image_id", String, ForeignKey("images.id"), nullable=False, index=True),
    Column("created", String, nullable=False),
    Column("doc", JSON, nullable=False),
)

# What was kept after which step of a build, by the step's key.
kept_steps = Table(
    "kept_steps",
    metadata,
    Column("key", String, primary_key=True),
    Column("snapshot_id", String, ForeignKey("snapshots.id"), nullable=False, index=True),
    Column("used", Integer, nullable=False, index=True),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("id", String, primary_key=True),
    Column("state", String, nullable=False, index=True),
    Column("template_id", String, nullable=False),
    Column("build_id", String, nullable=False),
    Column("image_id", String, nullable=False, index=True),
    Column("snapshot_id", String, index=True),
    Column("disk_id", String, index=True),
    Column("slot", Integer),
    Column("started_at", String, nullable=False, index=True),
    Column("end_at", String, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("doc", JSON, nullable=False),
)
