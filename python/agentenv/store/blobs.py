"""The contract of the blob store: immutable bytes under a key, whole or not there.

A key is ``KIND/NAME`` with a kind of ``[a-z]`` and a name of lower-case hex digits. Blobs are
written as drafts; ``commit`` makes one visible under its key, durable when it returns. A draft
that is not committed leaves nothing, and one whose process died is removed by ``sweep``.
"""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

KEY = re.compile(r"^[a-z]+/[0-9a-f]{8,128}$")


class Draft(Protocol):
    """A blob being written: ``path`` is an empty file of the writer's own."""

    @property
    def path(self) -> Path: ...

    async def commit(self, key: str) -> Path:
        """Publish; a key that is taken keeps its blob (both are the same content)."""
        ...


class Blobs(Protocol):
    """All raise InfraError: ``disk_full`` when there is no space, else ``file_failed``."""

    def draft(self) -> AbstractAsyncContextManager[Draft]: ...

    async def path(self, key: str) -> Path | None:
        """Where the blob can be read on this node; None if it is not there."""
        ...

    async def keys(self) -> set[str]: ...

    async def delete(self, key: str) -> None:
        """Not there is success."""
        ...

    async def sweep(self) -> int:
        """Remove drafts whose writer is gone; how many."""
        ...
