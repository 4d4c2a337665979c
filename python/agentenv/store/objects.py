"""The contract of the object store: whole immutable objects under keys, in a directory or S3.

The truth behind the block store. ``_core.Objects`` (rust/objects) does the work; here its errors
become ours. An operation whose task is cancelled still ends by itself: whole or nothing.

All raise InfraError: ``store_unavailable`` (worth another try later), ``store_denied``,
``disk_full``, ``store_damaged`` (shorter, or larger, than it must be) or ``store_failed``; and
UserError ``invalid_store`` for a URL, a configuration or a key that cannot be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from agentenv.errors import AgentEnvError, InfraError, NotFound, UserError, faults

if TYPE_CHECKING:
    from agentenv import _core

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """``modified`` is in seconds since the epoch, by the store's clock."""

    key: str
    size: int
    modified: float


class Objects(Protocol):
    """Keys are ``[a-z0-9._-]`` between slashes; no part is empty or begins with a dot."""

    async def get(self, key: str, limit: int) -> bytes | None:
        """None if it is not there; one of more than ``limit`` bytes is damaged."""
        ...

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """Exactly these bytes; NotFound if the object is not there."""
        ...

    async def get_to(self, key: str, path: Path) -> int:
        """Lay it at ``path``, whole or not at all, and say its size; or NotFound."""
        ...

    async def put(self, key: str, data: bytes) -> None:
        """Durable when it returns; takes the place of what is there."""
        ...

    async def put_new(self, key: str, data: bytes) -> bool:
        """As ``put`` if nothing is there; whether this call did it."""
        ...

    async def put_file(self, key: str, path: Path) -> None: ...

    async def head(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Sequence[Entry]:
        """By key; ``prefix`` is empty or ends with a slash."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Not there is success."""
        ...

    async def sweep_drafts(self) -> int:
        """Remove what writers that died left half made; how many."""
        ...


class CoreObjects:
    """Implements ``Objects``."""

    def __init__(self, core: _core.Objects) -> None:
        self._core = core

    async def with_core(
        self, call: Callable[Concatenate[_core.Objects, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """One of the extension's functions on this store, in a thread.

        Raises as all do, and InfraError ``layer_damaged`` for bytes that are not theirs.
        """
        try:
            with faults("a file could not be written"):
                return await _run(call, self._core, *args, **kwargs)
        except ValueError as error:
            raise InfraError(
                "what the store holds is damaged",
                why=str(error),
                fix="aenv store verify",
                code="layer_damaged",
            ) from error

    async def get(self, key: str, limit: int) -> bytes | None:
        try:
            return await _run(self._core.get, key, limit)
        except NotFound:
            return None

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        return await _run(self._core.get_range, key, start, end)

    async def get_to(self, key: str, path: Path) -> int:
        return await _run(self._core.get_to, key, path)

    async def put(self, key: str, data: bytes) -> None:
        await _run(self._core.put, key, data)

    async def put_new(self, key: str, data: bytes) -> bool:
        return await _run(self._core.put_new, key, data)

    async def put_file(self, key: str, path: Path) -> None:
        await _run(self._core.put_file, key, path)

    async def head(self, key: str) -> Entry | None:
        found = await _run(self._core.head, key)
        return Entry(key, *found) if found else None

    async def list(self, prefix: str) -> Sequence[Entry]:
        return [Entry(*item) for item in await _run(self._core.list, prefix)]

    async def delete(self, keys: Sequence[str]) -> None:
        await _run(self._core.delete, list(keys))

    async def sweep_drafts(self) -> int:
        return await _run(self._core.sweep_drafts)


async def open_objects(url: str) -> CoreObjects:
    """The store at ``/path``, ``file:///path`` or ``s3://BUCKET[/PREFIX][?OPTIONS]``.

    Options are endpoint, region, style (path, virtual), profile and timeout (seconds that the
    server may keep silent). Credentials come from the environment or the shared files.
    """
    from agentenv._core import Objects as Core

    return CoreObjects(await _run(Core, url))


async def _run(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    from agentenv._core import ObjectsError

    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except ObjectsError as error:
        raise _ours(*error.args) from error


def _ours(code: str, message: str) -> AgentEnvError:
    what = f"object store {message}"
    match code:
        case "not_found":
            return NotFound(what)
        case "invalid":
            return UserError(what, code="invalid_store")
        case "full":
            fix = "free some space: aenv store gc"
            why = "no space is left there"
            return InfraError(what, why=why, fix=fix, code="disk_full", http_status=507)
        case "denied":
            fix = "check the store's credentials and permissions"
            return InfraError(what, fix=fix, code="store_denied")
        case "unavailable":
            return InfraError(what, code="store_unavailable")
        case "damaged":
            return InfraError(what, fix="aenv store verify", code="store_damaged")
        case _:
            return InfraError(what, code="store_failed")
