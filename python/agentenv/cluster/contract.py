"""What the API talks to. ``cluster.local`` implements it on one node; a cluster of many follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentenv.sandbox.record import SandboxInfo
from agentenv.store.records import BuildRow, ImageRow, TemplateRow


@dataclass(frozen=True, slots=True)
class NewSandbox:
    """A request for a sandbox.

    ``template``: a template's id or name (``name``, ``name:tag``), or an image reference for a
    cold start. ``timeout`` in seconds; None takes the node's default. Sizes of None are the
    node's defaults. ``secure``: the in-guest API demands a token.
    """

    template: str
    timeout: float | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    secure: bool = True
    allow_internet: bool = True
    vcpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One machine: its id, engine capabilities and load."""

    id: str
    version: str
    capabilities: dict[str, Any]
    running: int
    load: dict[str, Any]


class Cluster(Protocol):
    """Sandbox calls raise NotFound (``sandbox_not_found``) for one that is unknown or has ended.

    Lifecycle work runs to its end even when the caller is cancelled meanwhile.
    """

    async def create(self, request: NewSandbox) -> SandboxInfo: ...
    async def get(self, sandbox_id: str) -> SandboxInfo: ...

    async def list(self) -> Sequence[SandboxInfo]:
        """Those that have not ended, newest first."""
        ...

    async def kill(self, sandbox_id: str) -> None: ...
    async def set_timeout(self, sandbox_id: str, seconds: float) -> SandboxInfo: ...

    async def connect(self, sandbox_id: str, seconds: float | None) -> SandboxInfo:
        """Extend (never shorten) the life of a running sandbox."""
        ...

    async def inspect(self, sandbox_id: str) -> dict[str, Any]:
        """Host objects, phases of creation; also of one that ended lately, with its post-mortem."""
        ...

    async def console(self, sandbox_id: str, lines: int) -> Sequence[str]:
        """The last console lines; also of one that ended lately."""
        ...

    async def templates(self) -> Sequence[tuple[TemplateRow, BuildRow | None]]: ...

    async def template(self, key: str) -> TemplateRow:
        """Raises NotFound (``template_not_found``)."""
        ...

    async def drop_template(self, key: str) -> None: ...

    async def images(self) -> Sequence[ImageRow]: ...

    async def nodes(self) -> Sequence[NodeInfo]: ...
