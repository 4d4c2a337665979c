"""Locks on files, between processes and between tasks alike; second names of files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import struct
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from agentenv.errors import faults

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


def second_name(path: Path, target: Path, folder_mode: int = 0o700) -> None:
    """Give the file a second name, or its copy on another file system; durable. Blocking."""
    with faults(f"{target.name} could not be kept"):
        target.parent.mkdir(mode=folder_mode, parents=True, exist_ok=True)
        _sync(path)
        try:
            link_or_copy(path, target)
        except FileExistsError:
            return
        _sync(target.parent)


def link_or_copy(path: Path, target: Path) -> None:
    """A second name, or a copy on another file system. Raises OSError. Blocking."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(path, target)


def _copy(path: Path, target: Path) -> None:
    """To another file system, whole or not at all."""
    draft = target.with_suffix(f".draft-{os.getpid()}")
    try:
        shutil.copy(path, draft)
        _sync(draft)
        draft.rename(target)
    finally:
        draft.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
