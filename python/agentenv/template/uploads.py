"""Archives of files for COPY steps, kept by the hash that their sender gave them.

The hash is the SDK's own over what it packed and cannot be made again from the archive, so it is
only a name; whoever holds the API key may put anything under it.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterable
from pathlib import Path

from agentenv.errors import UserError, faults
from agentenv.model import new_id

HASH = re.compile(r"^[0-9a-f]{64}$")
KEPT = 7 * 24 * 3600.0  # seconds after its last use
FOLDER_MODE = 0o700


class Uploads:
    """``limit``: bytes of one archive."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit

    def find(self, name: str) -> Path | None:
        """The archive, which counts as used now; None if it is not there. Raises UserError."""
        path = self._path(name)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    async def put(self, name: str, pieces: AsyncIterable[bytes]) -> int:
        """Keep an archive, whole or not at all; its bytes. Raises UserError, InfraError."""
        path = self._path(name)
        draft = path.with_name(f"{name}.{new_id()}")
        size = 0
        with faults("the uploaded files could not be kept"):
            self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            try:
                with draft.open("xb") as file:
                    async for piece in pieces:
                        size += len(piece)
                        self._check(size)
                        await asyncio.to_thread(file.write, piece)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        return size

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise UserError(
                f"the files of one step are more than {self._limit} bytes",
                fix="leave some out by .dockerignore, or raise upload_size",
                code="upload_too_large",
                http_status=413,
            )

    def sweep(self) -> None:
        """Remove what was not used for long, and what a dead server was receiving."""
        now = time.time()
        for path in self._folder.glob("*"):
            is_draft = HASH.match(path.name) is None
            if is_draft or now - path.stat().st_mtime > KEPT:
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not HASH.match(name):
            raise UserError(f"{name!r} is no hash of files", code="invalid_hash")
        return self._folder / name
