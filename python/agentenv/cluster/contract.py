"""What the API talks to. ``cluster.local`` implements it on one node; a cluster of many follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from agentenv.errors import AgentEnvError
from agentenv.sandbox.logs import Entry
from agentenv.sandbox.metrics import Sample
from agentenv.sandbox.record import NewSandbox, SandboxInfo
from agentenv.sandbox.suspend import How
from agentenv.store.records import DEFAULT_TAG, ImageRow


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One machine: its id, engine capabilities and load."""

    id: str
    version: str
    capabilities: dict[str, Any]
    running: int
    load: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A template that is a snapshot of a sandbox, made by request. ``names`` are ``name:tag``."""

    template_id: str
    build_id: str
    names: tuple[str, ...]
    sandbox_id: str
    created: datetime

    @property
    def id(self) -> str:
        """What sandboxes are made from."""
        return self.names[0] if self.names else f"{self.template_id}:{DEFAULT_TAG}"


class Cluster(Protocol):
    """Sandbox calls raise NotFound (``sandbox_not_found``) for one that is unknown or has ended.

    Lifecycle work runs to its end even when the caller is cancelled meanwhile.
    """

    async def create(self, request: NewSandbox) -> SandboxInfo: ...

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """For one that ended lately NotFound says why it did (``details["cause"]``)."""
        ...

    async def list(self) -> Sequence[SandboxInfo]:
        """Those that have not ended, newest first."""
        ...

    async def kill(self, sandbox_id: str) -> None: ...
    async def set_timeout(self, sandbox_id: str, seconds: float) -> SandboxInfo: ...

    async def connect(
        self, sandbox_id: str, seconds: float | None, *, memory: bool = True
    ) -> tuple[SandboxInfo, bool]:
        """Extend (never shorten) the life of a running sandbox, or resume a paused one; whether it
        was paused. Without ``memory`` that is booted from its disk."""
        ...

    async def pause(self, sandbox_id: str, how: How) -> None:
        """Durable on its node when this returns. Raises Conflict if it is paused already."""
        ...

    async def snapshot(self, sandbox_id: str, name: str | None, how: How) -> SnapshotInfo:
        """A named snapshot of a running sandbox, which goes on; sandboxes can be made from it."""
        ...

    async def fork(
        self, sandbox_id: str, count: int, seconds: float | None
    ) -> Sequence[SandboxInfo | AgentEnvError]:
        """Copies of a running sandbox, which goes on; each is there or failed by itself."""
        ...

    async def snapshots(
        self, sandbox_id: str | None = None, name: str | None = None
    ) -> Sequence[SnapshotInfo]:
        """Named snapshots, newest first."""
        ...

    async def set_network(
        self, sandbox_id: str, internet: bool, allow: tuple[str, ...], deny: tuple[str, ...]
    ) -> None:
        """Replace the whole policy of what it reaches; in force when this returns."""
        ...

    async def metrics(self, sandbox_id: str, start: float, end: float) -> Sequence[Sample]:
        """Samples between two Unix times, oldest first; also of one that ended lately."""
        ...

    async def logs(self, sandbox_id: str) -> Sequence[Entry]:
        """What the node and the console say of it, oldest first; also of one that ended lately."""
        ...

    async def inspect(self, sandbox_id: str) -> dict[str, Any]:
        """Host objects, phases of creation; also of one that ended lately, with its post-mortem."""
        ...

    async def console(self, sandbox_id: str, lines: int) -> Sequence[str]:
        """The last console lines; also of one that ended lately."""
        ...

    async def images(self) -> Sequence[ImageRow]: ...

    async def nodes(self) -> Sequence[NodeInfo]: ...
