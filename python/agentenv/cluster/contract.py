"""What the API talks to. ``cluster.local`` implements it on one node; a cluster of many follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentenv.sandbox.logs import Entry
from agentenv.sandbox.metrics import Sample
from agentenv.sandbox.record import NewSandbox, SandboxInfo
from agentenv.store.records import ImageRow


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

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """For one that ended lately NotFound says why it did (``details["cause"]``)."""
        ...

    async def list(self) -> Sequence[SandboxInfo]:
        """Those that have not ended, newest first."""
        ...

    async def kill(self, sandbox_id: str) -> None: ...
    async def set_timeout(self, sandbox_id: str, seconds: float) -> SandboxInfo: ...

    async def connect(self, sandbox_id: str, seconds: float | None) -> SandboxInfo:
        """Extend (never shorten) the life of a running sandbox."""
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
