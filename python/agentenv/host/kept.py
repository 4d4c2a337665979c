"""What the supervisor keeps of a process that is started again: its spec and its descriptors.

A record beside that of the status (``NAME.spec``) lets a new supervisor go on: it takes the
descriptors back from the running child. They are told by device and inode, since the child may have
put others in their place.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.host.process import ProcessSpec, spec_from_json, spec_to_json

FIRST_FD = 3
MAX_FDS = 16
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between an end and the next start
LONG_RUN = 60.0  # seconds after which an end counts as the first again
SYS_PIDFD_GETFD = 438  # of every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def pause(quick: int) -> float:
    """Seconds to wait before the next start, after ``quick`` ends one soon after the other."""
    return min(FIRST_PAUSE * 2 ** min(quick, 16), LONGEST_PAUSE)


def lift(fd: int) -> int:
    """Move a descriptor above the numbers that children get theirs at."""
    lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + MAX_FDS)
    os.close(fd)
    return lifted


@dataclass
class Kept:
    spec: ProcessSpec
    fds: list[int]
    asked: bool = False  # its end was asked for
    quick: int = 0
    started: float = field(default_factory=time.monotonic)
    pending: asyncio.TimerHandle | None = None

    def next_pause(self) -> float:
        if time.monotonic() - self.started >= LONG_RUN:
            self.quick = 0
        self.quick += 1
        return pause(self.quick - 1)

    def call_off(self) -> bool:
        """Start it no more; True if it was about to be."""
        self.asked = True
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.cancel()
        return pending is not None

    def close(self) -> None:
        self.call_off()
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def save(self, path: Path) -> None:
        identities = [_identity(fd) for fd in self.fds]
        record = {"spec": spec_to_json(self.spec), "fds": identities, "asked": self.asked}
        fresh = path.with_suffix(".new-spec")
        fresh.write_text(json.dumps(record))
        fresh.rename(path)


def take_back(path: Path, pid: int | None) -> Kept | None:
    """What an earlier supervisor kept, from its record and the running child (None: it ended).

    None if there is no record or a descriptor is not to be had any more.
    """
    try:
        record = json.loads(path.read_text())
        spec, wanted = spec_from_json(record["spec"]), record["fds"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kept = Kept(spec, [], record["asked"])
    try:
        for number, identity in enumerate(wanted, FIRST_FD):
            kept.fds.append(lift(_fd_of(pid, number)))
            if _identity(kept.fds[-1]) != identity:
                raise OSError(f"descriptor {number} is another one")
    except OSError:
        kept.close()
        return None
    return kept


def _fd_of(pid: int | None, number: int) -> int:
    if pid is None:
        raise ProcessLookupError("the process that held the descriptors has ended")
    pidfd = os.pidfd_open(pid)
    with contextlib.closing(os.fdopen(pidfd, "rb", buffering=0)):
        fd = _libc.syscall(SYS_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _identity(fd: int) -> list[int]:
    status = os.fstat(fd)
    return [status.st_dev, status.st_ino, status.st_rdev]
