"""Blobs as files in a directory: ``ROOT/KIND/ab/abcdef…``, drafts in ``ROOT/drafts``.

A draft's writer holds a lock on it, so any process can tell a draft in the making from one whose
writer died. Blobs are world-readable (0444): engines run as users of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from agentenv.errors import faults
from agentenv.store.blobs import KEY

DRAFTS = "drafts"
FOLDER_MODE = 0o711  # names are digests: who knows one may read, nobody needs to list


class DirectoryDraft:
    """Implements ``Draft``."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path

    @property
    def path(self) -> Path:
        return self._path

    async def commit(self, key: str) -> Path:
        return await asyncio.to_thread(self._commit, key)

    def _commit(self, key: str) -> Path:
        target = blob_path(self._root, key)
        with faults(f"blob {key} could not be stored"):
            if target.exists():
                return target
            target.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._path.chmod(0o444)
            _sync(self._path)
            self._path.rename(target)
            _sync(target.parent)
        return target


class DirectoryBlobs:
    """Implements ``Blobs`` in ``root``, which is made if it is not there."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @asynccontextmanager
    async def draft(self) -> AsyncGenerator[DirectoryDraft]:
        path = self._root / DRAFTS / secrets.token_hex(16)
        with faults("a draft could not be made"):
            path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield DirectoryDraft(self._root, path)
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    async def path(self, key: str) -> Path | None:
        found = blob_path(self._root, key)
        return found if found.exists() else None

    async def keys(self) -> set[str]:
        return await asyncio.to_thread(self._keys)

    def _keys(self) -> set[str]:
        found = (p for p in self._root.glob("*/??/*") if p.parts[-3] != DRAFTS)
        return {f"{path.parts[-3]}/{path.name}" for path in found}

    async def delete(self, key: str) -> None:
        path = blob_path(self._root, key)
        with faults(f"blob {key} could not be deleted"):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it, or come just now
                path.parent.rmdir()

    async def sweep(self) -> int:
        return await asyncio.to_thread(self._sweep)

    def _sweep(self) -> int:
        removed = 0
        for path in (self._root / DRAFTS).glob("*"):
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
        return removed


def blob_path(root: Path, key: str) -> Path:
    """Where ``key`` lies below ``root``."""
    if not KEY.match(key):
        raise ValueError(f"{key!r} is no blob key")
    kind, name = key.split("/")
    return root / kind / name[:2] / name


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
