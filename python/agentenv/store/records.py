"""The contract of the record store: what is remembered about images, templates and sandboxes.

Records are plain values. Times are UTC with microseconds. ``doc`` holds what
only the owner of a record reads; the other fields are what records are found by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

DEFAULT_TAG = "default"


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
    """One build of a template: a snapshot, or an image to boot from. ``id`` is a UUID.

    ``status``: waiting, building, ready or error. ``doc`` may hold ``guest`` (env, user, workdir,
    volumes), ``resources``, ``config``, and of a failed one the ``reason``.
    """

    id: str
    template_id: str
    image_id: str | None
    created: datetime
    doc: dict[str, Any] = field(default_factory=dict[str, Any])
    snapshot_id: str | None = None
    status: str = "ready"


@dataclass(frozen=True, slots=True)
class SandboxRow:
    """A sandbox as it must be found again: ``slot`` is None when it holds none."""

    id: str
    state: str
    template_id: str
    build_id: str
    image_id: str
    slot: int | None
    started_at: datetime
    end_at: datetime
    metadata: dict[str, str]
    doc: dict[str, Any]


class Records(Protocol):
    """Every call is one transaction, durable when it returns. InfraError: the store failed."""

    async def close(self) -> None: ...

    async def put_image(self, row: ImageRow) -> None:
        """Insert or replace. A reference names one image at a time: the newest."""
        ...

    async def image(self, key: str) -> ImageRow | None:
        """By id or by reference."""
        ...

    async def images(self) -> list[ImageRow]: ...

    async def drop_image(self, image_id: str) -> None:
        """Raises Conflict (``image_in_use``) while a build or a sandbox refers to it."""
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

    async def put_build(self, row: BuildRow) -> None: ...
    async def build(self, build_id: str) -> BuildRow | None: ...

    async def builds(
        self, template_id: str | None = None, *, status: str | None = None
    ) -> list[BuildRow]:
        """Newest first."""
        ...

    async def drop_build(self, build_id: str) -> None: ...

    async def keep_step(self, key: str, snapshot_id: str) -> None:
        """Remember what was kept after a step of a build."""
        ...

    async def kept_step(self, key: str) -> str | None:
        """The snapshot that was kept, which counts as used now."""
        ...

    async def drop_kept_steps(self, snapshot_id: str) -> None: ...

    async def kept_steps(self) -> list[str]:
        """Snapshots, used last first, each once."""
        ...

    async def put_sandbox(self, row: SandboxRow) -> None: ...
    async def sandbox(self, sandbox_id: str) -> SandboxRow | None: ...
    async def sandboxes(self) -> list[SandboxRow]: ...
    async def drop_sandbox(self, sandbox_id: str) -> None: ...
