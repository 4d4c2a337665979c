"""Files of a sandbox: bytes, entries, watches, and whole trees in and out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from agentenv.errors import Conflict, NotFound, UserError
from agentenv.sdk import archive
from agentenv.sdk.guest import Body, Guest

CHUNK = 256 << 10  # bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """``kind`` is ``file``, ``directory`` or empty for anything else; ``size`` in bytes; mode and
    kind of a link are its target's, ``link`` is where it leads."""

    name: str
    path: str
    kind: str
    size: int
    mode: int
    owner: str
    group: str
    modified: datetime
    link: str | None = None

    @property
    def is_folder(self) -> bool:
        return self.kind == "directory"


@dataclass(frozen=True, slots=True)
class Change:
    """``kind``: create, write, remove, rename or chmod; ``name`` is relative to what is watched."""

    kind: str
    name: str


class Files:
    """Paths are absolute, relative to the user's home, or begin with ``~``."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    async def read(self, path: str, *, user: str | None = None) -> bytes:
        """The whole content. Raises NotFound."""
        return b"".join([piece async for piece in self.stream(path, user=user)])

    async def stream(self, path: str, *, user: str | None = None) -> AsyncGenerator[bytes, None]:
        """The content as it comes, in bounded memory."""
        async with self._guest.open("GET", "/files", params=_query(path, user)) as response:
            async for piece in response.aiter_raw(CHUNK):
                yield piece

    async def write(
        self,
        path: str,
        content: bytes | str | Path | AsyncIterable[bytes],
        *,
        user: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Make or replace a file, and what is missing above it: whole or, on failure, not at all.

        A ``Path`` is a file of this machine's. Raises GuestError (``guest_disk_full``).
        """
        body: Body = content.encode() if isinstance(content, str) else _body(content)
        headers: dict[str, str | bytes] = {"Content-Type": "application/octet-stream"}
        for key, value in (metadata or {}).items():
            if not key.isascii() or not key.isprintable() or not value.isprintable():
                raise UserError(f"metadata {key!r} cannot be kept", why="it must be printable")
            headers[f"X-Metadata-{key}"] = value.encode()
        await self._guest.request(
            "POST", "/files", params=_query(path, user), headers=headers, content=body
        )

    async def stat(self, path: str, *, user: str | None = None) -> Entry:
        """Raises NotFound."""
        return _entry((await self._call("Stat", user, path=path))["entry"])

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        try:
            await self.stat(path, user=user)
        except NotFound as error:
            if error.code != "not_found":  # the sandbox is gone
                raise
            return False
        return True

    async def list(self, path: str, *, depth: int = 1, user: str | None = None) -> list[Entry]:
        found = await self._call("ListDir", user, path=path, depth=depth)
        return [_entry(entry) for entry in found["entries"]]

    async def make_dir(self, path: str, *, user: str | None = None) -> bool:
        """With what is missing above; False if it is there already."""
        try:
            await self._call("MakeDir", user, path=path)
        except Conflict:
            return False
        return True

    async def move(self, source: str, destination: str, *, user: str | None = None) -> Entry:
        found = await self._call("Move", user, source=source, destination=destination)
        return _entry(found["entry"])

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """A file, or a folder with all in it; not there is success."""
        await self._call("Remove", user, path=path)

    async def watch(
        self, path: str, *, recursive: bool = False, user: str | None = None
    ) -> AsyncGenerator[Change, None]:
        """What changes in a folder, until the generator is closed."""
        request = {"path": path, "recursive": recursive}
        stream = self._guest.stream("filesystem.Filesystem/WatchDir", request, user)
        async with aclosing(stream):
            async for message in stream:
                if event := message.get("filesystem"):
                    yield Change(event["type"].removeprefix("EVENT_TYPE_").lower(), event["name"])

    async def upload(
        self, source: Path, folder: str, *, name: str | None = None, user: str | None = None
    ) -> None:
        """A file or tree of this machine into ``folder``, as ``name`` or by its own: modes, owners
        (or all ``user``), times, links and holes as tar keeps them."""
        content = archive.pack(source, name or source.name)
        await self._guest.request("POST", "/archive", params=_query(folder, user), content=content)

    async def download(
        self, path: str, folder: Path, *, name: str | None = None, special: bool = False
    ) -> None:
        """A file or tree of the sandbox into ``folder`` of this machine, as ``name`` or by its own.

        As tar would; devices and setuid bits only if ``special``. Raises GuestError
        (``guest_archive``) for a stream that would write elsewhere.
        """
        async with self._guest.open("GET", "/archive", params=_query(path, None)) as response:
            await archive.unpack(response.aiter_raw(CHUNK), folder, name=name, special=special)

    async def _call(self, method: str, user: str | None, **message: Any) -> Any:
        return await self._guest.call(f"filesystem.Filesystem/{method}", message, user)


def _query(path: str, user: str | None) -> dict[str, str]:
    return {"path": path, **({"username": user} if user else {})}


def _body(content: bytes | Path | AsyncIterable[bytes]) -> Body:
    return _read(content) if isinstance(content, Path) else content


async def _read(path: Path) -> AsyncGenerator[bytes, None]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, CHUNK):
            yield piece


def _entry(entry: Mapping[str, Any]) -> Entry:
    return Entry(
        name=entry["name"],
        path=entry["path"],
        kind=entry.get("type", "").removeprefix("FILE_TYPE_").lower().replace("unspecified", ""),
        size=int(entry.get("size", 0)),
        mode=int(entry.get("mode", 0)),
        owner=entry.get("owner", ""),
        group=entry.get("group", ""),
        modified=_time(entry.get("modifiedTime", "1970-01-01T00:00:00Z")),
        link=entry.get("symlinkTarget"),
    )


def _time(text: str) -> datetime:
    """RFC 3339 with nanoseconds, of which Python keeps six digits."""
    whole, _, rest = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{rest[:6]:0<6}+00:00")
