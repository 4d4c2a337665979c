"""What is known of a sandbox, as a value, and its form in the record store. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from agentenv.engine.contract import ExitCause, ExitKind
from agentenv.model import Resources
from agentenv.sandbox.state import State
from agentenv.store.records import SandboxRow

ENVD_VERSION = "0.6.13"  # the protocol version whose behaviour the guest agent has (E2B.md §3)


@dataclass(frozen=True, slots=True)
class Guest:
    """What the agent is told at its start: identity, environment, user, folders to make."""

    env: dict[str, str] = field(default_factory=dict[str, str])
    user: str | None = None
    workdir: str | None = None
    volumes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as others see it. Times are UTC; ``phases`` maps a step of creation to seconds."""

    id: str
    state: State
    template_id: str
    build_id: str
    image_id: str
    started_at: datetime
    end_at: datetime
    resources: Resources
    guest: Guest
    slot: int | None = None
    alias: str | None = None
    access_token: str | None = None
    allow_internet: bool = True
    generation: int = 1
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    phases: dict[str, float] = field(default_factory=dict[str, float])
    cause: ExitCause | None = None

    def with_(self, **changes: Any) -> SandboxInfo:
        return replace(self, **changes)


_OWN_COLUMNS = {
    "id", "state", "template_id", "build_id", "image_id", "slot", "started_at", "end_at", "metadata",
}  # fmt: skip


def to_row(info: SandboxInfo) -> SandboxRow:
    values = asdict(info)
    doc = {name: value for name, value in values.items() if name not in _OWN_COLUMNS}
    columns = {name: value for name, value in values.items() if name in _OWN_COLUMNS}
    return SandboxRow(**{**columns, "state": str(info.state)}, doc=doc)


def from_row(row: SandboxRow) -> SandboxInfo:
    doc = dict(row.doc)
    guest, cause = doc.pop("guest"), doc.pop("cause")
    return SandboxInfo(
        id=row.id,
        state=State(row.state),
        template_id=row.template_id,
        build_id=row.build_id,
        image_id=row.image_id,
        slot=row.slot,
        started_at=row.started_at,
        end_at=row.end_at,
        metadata=row.metadata,
        resources=Resources(**doc.pop("resources")),
        guest=Guest(**{**guest, "volumes": tuple(guest["volumes"])}),
        cause=cause and _cause(cause),
        **doc,
    )


def _cause(raw: dict[str, Any]) -> ExitCause:
    return ExitCause(
        ExitKind(raw["kind"]), raw["reason"], raw["status"], tuple(raw["console"])
    )
