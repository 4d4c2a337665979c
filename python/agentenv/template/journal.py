"""A build's log: entries by level and step, on disk line by line, read by position."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentenv.errors import faults
from agentenv.sandbox.logs import LEVELS, Level

PAGE = 100  # entries of one answer (E2B.md §1.2)
MAX_ENTRIES = 100_000
MAX_LINE = 8192  # characters


@dataclass(frozen=True, slots=True)
class LogEntry:
    """``step`` is ``base``, ``finalize`` or the step's number, from 1."""

    time: datetime
    level: Level
    message: str
    step: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "time": self.time.isoformat()}


_ENTRY = TypeAdapter(LogEntry)


class Journal:
    """Of one build, at ``path``; written by that build only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: list[LogEntry] = []
        self._file = None

    @classmethod
    def read(cls, path: Path) -> Journal:
        """What an earlier build has left; nothing if that is gone."""
        journal = cls(path)
        if path.exists():
            journal._entries = list(_entries(path.read_text()))
        return journal

    def add(self, level: Level, message: str, step: str | None = None) -> None:
        """A line that is too long is cut, and so is a log that never ends."""
        if len(self._entries) > MAX_ENTRIES:
            return
        if len(self._entries) == MAX_ENTRIES:
            level, message, step = "warn", "the log is too long: the rest is left out", None
        message = message[:MAX_LINE].encode(errors="replace").decode()
        entry = LogEntry(datetime.now(UTC), level, message, step)
        with faults("the build's log could not be written"):
            if self._file is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(json.dumps(entry.to_json()) + "\n")
            self._file.flush()
        self._entries.append(entry)

    def page(
        self, offset: int = 0, *, limit: int = PAGE, level: Level | None = None
    ) -> Sequence[LogEntry]:
        """At most ``limit`` entries of at least this level, from the ``offset``-th of them on."""
        least = LEVELS.index(level) if level else 0
        wanted = [e for e in self._entries if LEVELS.index(e.level) >= least]
        return wanted[offset : offset + limit]

    def last(self, step: str, count: int) -> Sequence[LogEntry]:
        """The last entries of one step."""
        return [entry for entry in self._entries if entry.step == step][-count:]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Lines:
    """Output in pieces, put together to lines."""

    def __init__(self) -> None:
        self._rest: dict[str, bytes] = {}

    def feed(self, stream: str, data: bytes) -> list[str]:
        *whole, rest = (self._rest.get(stream, b"") + data).split(b"\n")
        if len(rest) > MAX_LINE:
            whole, rest = [*whole, rest], b""
        self._rest[stream] = rest
        return [_text(line) for line in whole]

    def end(self) -> list[tuple[str, str]]:
        """Lines that were not ended, with their stream."""
        left = [(stream, _text(rest)) for stream, rest in self._rest.items() if rest]
        self._rest.clear()
        return left


def _text(line: bytes) -> str:
    """What a terminal would show of it at the end: a bar that was drawn over itself once."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _entries(text: str) -> Iterator[LogEntry]:
    """What is whole: a server that died may have left half a line."""
    for line in text.splitlines():
        with contextlib.suppress(ValidationError):
            yield _ENTRY.validate_json(line)
