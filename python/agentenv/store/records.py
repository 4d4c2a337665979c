"""The contract of the record store: what is remembered about images, templates and sandboxes.

Records are plain values. Times are UTC with microseconds. ``doc`` holds what
only the owner of a record reads; the other fields are what records are found by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from agentenv.store.steps import Steps

DEFAULT_TAG = "default"
READY = "ready"


@dataclass(frozen=True, slots=True)
class ImageRow:
    """A read-only root."""

    id: str
    reference: str
    digest: str
    created: datetime
    doc: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateRow:
    """Named builds: ``names`` are unique across templates, ``tags`` map a tag to a build id."""

    id: str
    names: tuple[str, ...]
    tags: dict[str, str]
    created: datetime
    public: bool = False


@dataclass(frozen=True, slots=True)
class BuildRow:
    """One build of a template; ``id`` is a UUID. Its sandboxes are restored from the snapshot, or
    booted from the image where there is none. ``status``: waiting, building, ready, error.

    ``doc`` of one that was built by steps has ``guest``, ``resources`` and ``config``, of one that
    failed the ``reason``.
    """

    id: str
    template_id: str
    image_id: str | None
    created: datetime
    doc: dict[str, Any] = field(default_factory=dict[str, Any])
    snapshot_id: str | None = None
    status: str = READY


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A resumable point of a sandbox; ``doc`` is its manifest. ``parent`` is the snapshot that its
    sandbox was restored from."""

    id: str
    parent: str | None
    sandbox_id: str
    image_id: str
    created: datetime
    doc: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SandboxRow:
    """A sandbox as it must be found again: ``slot`` is None when it holds none, ``snapshot_id``
    and ``disk_id`` name the snapshots that its memory and its disk lie over."""

    id: str
    state: str
    template_id: str
    build_id: str
    image_id: str
    snapshot_id: str | None
    disk_id: str | None
    slot: int | None
    started_at: datetime
    end_at: datetime
    metadata: dict[str, str]
    doc: dict[str, Any]


class Records(Protocol):
    """Every call is one transaction, durable when it returns. InfraError: the store failed."""

    @property
    def steps(self) -> Steps: ...

    async def close(self) -> None: ...

    async def put_image(self, row: ImageRow) -> None:
        """Insert or replace. A reference names one image at a time: the newest."""
        ...

    async def image(self, key: str) -> ImageRow | None:
        """By id or by reference."""
        ...

    async def images(self) -> list[ImageRow]: ...

    async def drop_image(self, image_id: str) -> None:
        """Raises Conflict (``image_in_use``) while a build, snapshot or sandbox refers to it."""
        ...

    async def put_template(self, row: TemplateRow) -> None:
        """Insert or replace. Raises Conflict (``name_taken``) if a name is another template's."""
        ...

    async def template(self, key: str) -> TemplateRow | None:
        """By id or by name (without tag)."""
        ...

    async def templates(self) -> list[TemplateRow]: ...

    async def drop_template(self, template_id: str) -> None:
        """With its builds. Sandboxes made from it live on."""
        ...

    async def put_build(self, row: BuildRow, tags: Sequence[str] = ()) -> None:
        """Insert or replace; these tags of its template mean it from the same moment on."""
        ...

    async def add_build(
        self, row: BuildRow, name: str | None, tags: Sequence[str] = ()
    ) -> BuildRow:
        """A build of the template ``name``, which ``tags`` mean from the same moment on. Where
        there is none of that name, or for None, one is made with the id that ``row`` has."""
        ...

    async def build(self, build_id: str) -> BuildRow | None: ...

    async def builds(
        self, template_id: str | None = None, *, status: str | None = None
    ) -> list[BuildRow]:
        """Newest first."""
        ...

    async def drop_build(self, build_id: str) -> None: ...

    async def put_snapshot(self, row: SnapshotRow, sandbox: SandboxRow | None = None) -> None:
        """Insert or replace, together with the sandbox that is paused in it."""
        ...

    async def snapshot(self, snapshot_id: str) -> SnapshotRow | None: ...
    async def snapshots(self) -> list[SnapshotRow]: ...

    async def needed_snapshots(self) -> set[str]:
        """Those that a build, a kept step or a sandbox that has not ended refers to."""
        ...

    async def drop_snapshot(self, snapshot_id: str) -> bool:
        """False (and it stays) while one of these refers to it."""
        ...

    async def put_sandbox(self, row: SandboxRow) -> None: ...
    async def sandbox(self, sandbox_id: str) -> SandboxRow | None: ...
    async def sandboxes(self) -> list[SandboxRow]: ...
    async def drop_sandbox(self, sandbox_id: str) -> None: ...
