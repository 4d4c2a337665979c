"""The contract of the blob store: immutable bytes under a key, whole or not there.

A key is ``KIND/NAME`` with a kind of ``[a-z]`` and a name of lower-case hex digits. Blobs are
written as drafts; ``commit`` makes one visible under its key, durable when it returns. A draft
that is not committed leaves nothing, and one whose process died is removed by ``sweep``.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from agentenv.errors import InfraError

KEY = re.compile(r"^[a-z]+/[0-9a-f]{8,128}$")


class Draft(Protocol):
    """A blob being written: ``path`` is an empty file of the writer's own."""

    @property
    def path(self) -> Path: ...

    async def commit(self, key: str) -> Path:
        """Publish; a key that is taken keeps its blob (both are the same content)."""
        ...


class Blobs(Protocol):
    """All raise InfraError: ``disk_full`` when there is no space, else ``blob_store``."""

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


@contextmanager
def faults(what: str) -> Generator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        raise fault(what, error) from error


def fault(what: str, error: OSError) -> InfraError:
    """What a failed file operation means to its operator."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InfraError(
            what,
            why="no space is left on the disk of the home",
            fix="free some: aenv image ls, aenv image rm",
            code="disk_full",
            http_status=507,
        )
    return InfraError(what, why=str(error), code="blob_store")
