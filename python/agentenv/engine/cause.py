"""Why an engine's process ended: from what it left to a cause a person understands. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from agentenv.engine.contract import ExitCause, ExitKind

PANIC_MARK = "Kernel panic"
GUEST_OOM_MARK = "Out of memory"
INIT_FATAL_MARK = "agentenv-init: fatal"

LINES_KEPT = 40  # of the console, for the post-mortem


def decide(
    *,
    engine: str,
    status: int | None,
    asked: bool,
    oom_kills: int,
    console: Sequence[str],
    engine_log: Sequence[str],
) -> ExitCause:
    """``engine`` is its name for people; ``status`` is None when nobody saw the end, negative for
    a signal; ``asked``: by us."""
    kind, reason = _kind(engine, status, asked, oom_kills, console, engine_log)
    return ExitCause(kind, reason, status, _kept(console))


def _kind(
    engine: str,
    status: int | None,
    asked: bool,
    oom_kills: int,
    console: Sequence[str],
    engine_log: Sequence[str],
) -> tuple[ExitKind, str]:
    if oom_kills and (status is None or status < 0) and not asked:
        return ExitKind.OUT_OF_MEMORY, "it needed more memory than its limit on the host"
    if (line := _find(console, PANIC_MARK)) is not None:
        return ExitKind.PANIC, f"the guest's kernel panicked: {line}"
    if (line := _find(console, INIT_FATAL_MARK)) is not None:
        return ExitKind.FAILED, line
    if asked:
        return ExitKind.STOPPED, "stopped on request"
    if status is None:
        return ExitKind.UNKNOWN, "the machine ended while nobody watched"
    if status < 0:
        return ExitKind.KILLED, f"the engine was killed by {_signal_name(-status)}"
    if status == 0:
        return ExitKind.STOPPED, "the guest powered itself off or rebooted"
    last = engine_log[-1] if engine_log else f"exit status {status}"
    return ExitKind.FAILED, f"{engine} failed: {last}"


def _kept(console: Sequence[str]) -> tuple[str, ...]:
    """The last lines, but a panic's own words with what follows, however long its trace is."""
    panics = [at for at, line in enumerate(console) if PANIC_MARK in line]
    begin = len(console) - LINES_KEPT
    if panics and panics[-1] < begin:
        return tuple(console[panics[-1] :][:LINES_KEPT])
    return tuple(console[-LINES_KEPT:])


def _find(lines: Sequence[str], mark: str) -> str | None:
    found = [line[line.index(mark) :] for line in lines if mark in line]
    return found[-1].strip() if found else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
