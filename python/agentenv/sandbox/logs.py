"""A sandbox's log: its life as the node sees it, and what its console says, as timed entries. Pure.

Lines of the guest's kernel and agent begin with seconds since its boot, ``[   12.345678] ``;
other lines (of a user's own services, say) have the time of the line before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from agentenv.engine.contract import ExitKind
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import State

Level = Literal["debug", "info", "warn", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warn", "error")
_STAMP = re.compile(r"\[\s*(\d+\.\d+)\] ?(.*)")
# What the kernel and our init say when it is serious; the level is not on the console.
_GRAVE = re.compile(r"panic|Oops|BUG:|Out of memory|oom-kill|fatal|Call Trace|I/O error")
# From the start of its machine to the state `running`.
_BOOT_PHASES = ("process", "boot", "init", "publish")


@dataclass(frozen=True, slots=True)
class Entry:
    time: datetime
    level: Level
    message: str
    fields: dict[str, str] = field(default_factory=dict[str, str])


def boot_seconds(info: SandboxInfo) -> float:
    """How long it took from its machine's start until it ran."""
    return sum(info.phases.get(name, 0.0) for name in _BOOT_PHASES)


def entries(info: SandboxInfo, console: Sequence[str]) -> list[Entry]:
    """Everything, oldest first."""
    booted = info.started_at - timedelta(seconds=boot_seconds(info))
    return [*_beginning(info, booted), *_console(booted, console), *_end(info)]


def _beginning(info: SandboxInfo, booted: datetime) -> Iterator[Entry]:
    size = info.resources
    fields = {"source": "node", "imageID": info.image_id}
    machine = f"{size.vcpus} CPUs, {size.memory_mib} MiB"
    yield Entry(booted, "info", f"sandbox {info.id} is started: {machine}", fields)


def _console(booted: datetime, lines: Iterable[str]) -> Iterator[Entry]:
    now = booted
    for line in lines:
        text = line.rstrip()
        if stamped := _STAMP.match(text):
            now = max(now, booted + timedelta(seconds=float(stamped[1])))
            text = stamped[2]
        if text:
            level: Level = "error" if _GRAVE.search(text) else "info"
            yield Entry(now, level, text, {"source": "console"})


def _end(info: SandboxInfo) -> Iterator[Entry]:
    if info.state is State.ENDED and info.cause:
        level: Level = "info" if info.cause.kind is ExitKind.STOPPED else "error"
        fields = {"source": "node", "cause": str(info.cause.kind)}
        yield Entry(info.end_at, level, f"sandbox ended: {info.cause.reason}", fields)


def select(
    found: Iterable[Entry],
    *,
    since: datetime | None = None,
    backward: bool = False,
    level: Level | None = None,
    search: str | None = None,
    limit: int,
) -> list[Entry]:
    """At most ``limit`` entries from ``since`` on in the direction asked for.

    ``level`` is the least that is wanted, ``search`` a part of the message.
    """
    least = LEVELS.index(level) if level else 0

    def wanted(entry: Entry) -> bool:
        reached = since is None or (entry.time <= since if backward else entry.time >= since)
        return (
            reached
            and LEVELS.index(entry.level) >= least
            and (not search or search.lower() in entry.message.lower())
        )

    chosen = list(filter(wanted, found))
    if backward:
        chosen.reverse()
    return chosen[:limit]
