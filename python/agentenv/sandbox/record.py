"""What is known of a sandbox, as a value, and its form in the record store. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentenv.engine.contract import ExitCause
from agentenv.errors import InfraError
from agentenv.model import Guest, Resources
from agentenv.sandbox.network import Policy
from agentenv.sandbox.state import State
from agentenv.store.records import SandboxRow

ENVD_VERSION = "0.6.13"  # the protocol version whose behaviour the guest agent has (E2B.md §3)


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The key that its create request carried, and a digest of that request."""

    key: str
    request: str


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """What happens at the deadline, chosen once. ``pause``: it is paused, not ended; with
    ``memory`` or from its disk alone. ``resume``: traffic brings a paused one back."""

    pause: bool = False
    memory: bool = True
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the guest made of its last start from a snapshot (the restore contract).

    ``clock_error_ms`` is how far its clock was from ours once set; ``frozen`` says that none of
    its processes ran before.
    """

    clock_error_ms: float
    entropy_reseeded: bool
    identity_fresh: bool
    connections_dropped: int
    frozen: bool


@dataclass(frozen=True, slots=True)
class NewSandbox:
    """A request for a sandbox.

    ``template``: a template's id or name (``name``, ``name:tag``), a snapshot's id, or an image
    reference for a cold start. ``timeout`` in seconds; None takes the node's default. Sizes of
    None are the snapshot's, else the node's defaults; so is the ``engine``. ``secure``: the
    in-guest API demands a token. A request that repeats one with the same ``idempotency`` gets the
    sandbox that the first one made.
    """

    template: str
    timeout: float | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    secure: bool = True
    network: Policy = Policy()
    lifecycle: Lifecycle = Lifecycle()
    idempotency: Idempotency | None = None
    vcpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as others see it. Times are UTC; ``phases`` maps a step of creation to seconds.

    ``network_pending``: its rules may still be those of an earlier policy. ``snapshot_id``: the
    snapshot that it is paused in, or that its memory lies over; ``disk_id``: the one that its
    disk lies over; ``from_disk``: its machine was booted from that disk, whatever else there is.
    ``machine``: the name of its machine, of the machine's folders and of what it reads.
    ``lifetime``: the seconds that its deadline was set to last. ``generation`` counts its machines.
    ``origin``: the sandbox or template it came from. ``guest_silent``: its agent did not answer
    when it was paused.
    """

    id: str
    state: State
    template_id: str
    build_id: str
    image_id: str
    started_at: datetime
    end_at: datetime
    resources: Resources
    guest: Guest
    engine: str = "qemu"
    snapshot_id: str | None = None
    disk_id: str | None = None
    slot: int | None = None
    machine: str = ""
    alias: str | None = None
    access_token: str | None = None
    traffic_token: str | None = None
    network: Policy = Policy()
    network_pending: bool = False
    idempotency: Idempotency | None = None
    generation: int = 1
    lifecycle: Lifecycle = Lifecycle()
    lifetime: float = 0.0
    origin: str | None = None
    guest_silent: bool = False
    from_disk: bool = False
    restore: Verdict | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    phases: dict[str, float] = field(default_factory=dict[str, float])
    cause: ExitCause | None = None

    @property
    def next_machine(self) -> str:
        """A name for the machine of its generation, if none waits that has one."""
        return f"{self.id}.{self.generation}"

    @property
    def failed_creation(self) -> bool:
        """It ended before it ever ran."""
        return self.state is State.ENDED and "publish" not in self.phases

    def with_(self, **changes: Any) -> SandboxInfo:
        return replace(self, **changes)


_INFO = TypeAdapter(SandboxInfo)
_OWN_COLUMNS = [item.name for item in fields(SandboxRow) if item.name != "doc"]


def to_row(info: SandboxInfo) -> SandboxRow:
    values = {**asdict(info), "state": str(info.state)}
    columns: dict[str, Any] = {name: values.pop(name) for name in _OWN_COLUMNS}
    return SandboxRow(**columns, doc=values)


def from_row(row: SandboxRow) -> SandboxInfo:
    """Raises InfraError (``sandbox_damaged``)."""
    columns = {name: getattr(row, name) for name in _OWN_COLUMNS}
    try:
        return _INFO.validate_python({**row.doc, **columns})
    except ValidationError as error:
        raise InfraError(
            f"the record of sandbox {row.id} cannot be read",
            why=str(error).splitlines()[0],
            fix=f"end it: aenv kill {row.id}",
            code="sandbox_damaged",
        ) from error
