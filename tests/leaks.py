"""Host objects that a test must leave as it found them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from agentenv.config import load

PROGRAMS = ("qemu-system", "agentenv", "runsc", "mkfs.erofs", "mmdebstrap")


@dataclass(frozen=True)
class HostObjects:
    """Everything of ours that outlives a process if somebody forgets it."""

    processes: frozenset[str]
    mounts: frozenset[str]
    links: frozenset[str]
    tables: frozenset[str]
    runtime: frozenset[str]
    cgroups: frozenset[str]

    @classmethod
    def now(cls) -> HostObjects:
        return cls(
            _processes(),
            frozenset(
                line.split()[4]
                for line in Path("/proc/self/mountinfo").read_text().splitlines()
                if "agentenv" in line or "aenv" in line or "/pytest-" in line
            ),
            frozenset(p.name for p in Path("/sys/class/net").iterdir()),
            frozenset(_output("nft", "list", "tables").splitlines()),
            frozenset(str(p) for p in Path("/run/agentenv").glob("*/*") if os.path.lexists(p)),
            frozenset(
                str(p)
                for root in (Path("/sys/fs/cgroup"),)
                for p in [*root.glob("*/agentenv/*/*"), *root.glob("agentenv/*/*")]
                if p.is_dir()
            ),
        )

    def more_than(self, before: HostObjects, *homes: Path) -> dict[str, list[str]]:
        """What is here now and was not before, by kind, and belongs to one of these homes."""
        marks = [mark for home in homes for mark in (home.name, load({"home": home}, {}).tag)]
        kinds = {
            item.name: sorted(
                each
                for each in getattr(self, item.name) - getattr(before, item.name)
                if any(mark in each for mark in marks)
            )
            for item in fields(self)
        }
        return {kind: found for kind, found in kinds.items() if found}


@contextmanager
def nothing_left(*homes: Path) -> Generator[list[Path]]:
    """At the end there is no more of these homes, and of those added, than now, whatever other
    servers and test sessions do meanwhile."""
    before, watched = HostObjects.now(), list(homes)
    yield watched
    left = HostObjects.now().more_than(before, *watched)
    assert not left, f"left behind: {left}"


def _processes() -> frozenset[str]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        text = b" ".join(words).decode(errors="replace").strip()
        if any(name in text for name in PROGRAMS) and "pytest" not in text:
            found.add(f"{entry.name} {text}")
    return frozenset(found)


def _output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout
