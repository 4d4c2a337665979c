"""Files in the making: each has a writer, none survives it.

A draft's writer holds a lock on it, so any process can tell a draft in the making from one whose
writer died.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import faults

FOLDER_MODE = 0o700


@dataclass(frozen=True, slots=True)
class Draft:
    """``path`` is an empty file of the writer's own."""

    path: Path


class Drafts:
    """Drafts in ``folder``, which is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @asynccontextmanager
    async def draft(self) -> AsyncGenerator[Draft]:
        """Raises InfraError (``disk_full``, ``file_failed``)."""
        path = self._folder / secrets.token_hex(16)
        with faults("a draft could not be made"):
            self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield Draft(path)
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    async def sweep(self) -> int:
        """Remove drafts whose writer is gone; how many."""
        return await asyncio.to_thread(self._sweep)

    def _sweep(self) -> int:
        removed = 0
        for path in self._folder.glob("*"):
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
        return removed
