"""Locks on files, between processes and between tasks of one process alike."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import struct
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

LOCK_POLL = 0.02  # seconds between two tries for a lock that somebody holds
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux


@asynccontextmanager
async def file_lock(path: Path, key: str = "", *, shared: bool = False) -> AsyncGenerator[None]:
    """Hold an advisory lock on ``path`` (made if missing); different keys exclude nobody.

    An open-file-description lock on one byte: released with the process, never left behind.
    """
    async with _opened(path) as fd:
        while not _try_lock(fd, key, shared=shared):
            await asyncio.sleep(LOCK_POLL)
        yield


@asynccontextmanager
async def try_file_lock(path: Path, key: str = "") -> AsyncGenerator[bool]:
    """As ``file_lock`` without waiting: yields whether the exclusive lock was had."""
    async with _opened(path) as fd:
        yield _try_lock(fd, key, shared=False)


@asynccontextmanager
async def _opened(path: Path) -> AsyncGenerator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int, key: str, *, shared: bool) -> bool:
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    # Two keys with one checksum wait for each other, which harms nothing.
    offset = zlib.crc32(key.encode()) + 1 if key else 0
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
