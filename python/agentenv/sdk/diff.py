"""What differs between the files of two sandboxes or snapshots, or of one and its image.

The guests tell what their disks have over the image (`GET /changes` of the agent). A snapshot, or
what a paused sandbox was saved in, is told by a sandbox made from it for as long as it takes.
"""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from agentenv.errors import Conflict, GuestError, NotFound
from agentenv.sdk.client import Client
from agentenv.sdk.guest import Guest

# It is ended when it has told; this is for a caller who dies meanwhile.
LIFETIME = 600  # seconds
# What is told to each sandbox anew (the restore contract) differs between any two.
IDENTITY = frozenset(("/etc/hostname", "/etc/hosts", "/etc/machine-id", "/etc/resolv.conf"))


class Letter(enum.StrEnum):
    ADDED = "A"
    MODIFIED = "M"
    DELETED = "D"


@dataclass(frozen=True, slots=True)
class Entry:
    """``mode`` without the kind's bits, times in nanoseconds, ``size`` in bytes (0 but for files);
    ``sha256`` if it was asked for."""

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: str | None = None
    sha256: str | None = None

    def differs(self, other: Entry) -> bool:
        """As far as it is known: times stand for content that was not hashed, and a folder's
        time for nothing."""
        return self._told(other) != other._told(self)

    def _told(self, other: Entry) -> tuple[Any, ...]:
        content = self.mtime_ns if self.kind == "file" else None
        if self.sha256 and other.sha256:
            content = self.sha256
        return (self.kind, self.mode, self.uid, self.gid, self.size, self.target, content)


@dataclass(frozen=True, slots=True)
class Change:
    """One name: what is there, and what the image has; None is nothing."""

    now: Entry | None
    image: Entry | None


@dataclass(frozen=True, slots=True)
class Difference:
    """``before`` and ``after`` are sizes in bytes; None where there is nothing."""

    change: Letter
    path: str
    kind: str
    before: int | None
    after: int | None


Changes = Mapping[str, Change]
"""By absolute path; what is not named is as in the image."""


def compare(one: Changes, other: Changes) -> list[Difference]:
    """What has to be done to ``one`` to have ``other``, by path. Pure.

    Both lie over the same image.
    """
    paths = sorted((one.keys() | other.keys()) - IDENTITY)
    told = (_difference(p, _seen(one, p, other), _seen(other, p, one)) for p in paths)
    return [each for each in told if each is not None]


def _difference(path: str, before: Entry | None, after: Entry | None) -> Difference | None:
    if after is None:
        if before is None:
            return None
        return Difference(Letter.DELETED, path, before.kind, before.size, None)
    if before is None:
        return Difference(Letter.ADDED, path, after.kind, None, after.size)
    if before.differs(after):
        return Difference(Letter.MODIFIED, path, after.kind, before.size, after.size)
    return None


def _seen(changes: Changes, path: str, other: Changes) -> Entry | None:
    """What is at a path that one of both names."""
    if path in changes:
        return changes[path].now
    for parent in map(str, PurePosixPath(path).parents):
        if found := changes.get(parent):
            if found.now is None or found.now.kind != "directory":
                return None  # it went with its folder
            break
    return other[path].image


async def diff(
    client: Client, one: str, other: str | None = None, *, checksum: bool = False
) -> Sequence[Difference]:
    """From ``one`` to ``other``; from its image to ``one`` if there is no other. Each is a
    sandbox's id, or what a sandbox can be made from: a snapshot, a template.

    Files count as equal if size, owner, mode and time of change are; with ``checksum`` by what
    is in them, which takes as long as to read what was changed. Raises NotFound, Conflict
    (``different_images``), GuestError, InfraError.
    """
    async with _guest(client, one) as (guest, image):
        before = await changes(guest, checksum=checksum)
        if other is None:
            return compare({}, before)
        async with _guest(client, other) as (other_guest, other_image):
            if image != other_image:
                raise Conflict(
                    f"{one} and {other} cannot be compared",
                    why="they are made from different images",
                    code="different_images",
                )
            return compare(before, await changes(other_guest, checksum=checksum))


async def changes(guest: Guest, *, checksum: bool = False) -> dict[str, Change]:
    """What a running sandbox's disk has over its image. Raises GuestError, InfraError."""
    found: dict[str, Change] = {}
    query = {"digests": "true"} if checksum else {}
    async with guest.open("GET", "/changes", params=query) as answer:
        async for line in answer.aiter_lines():
            try:
                said = json.loads(line)
                found[said["path"]] = Change(_entry(said["now"]), _entry(said["image"]))
            except (ValueError, KeyError, TypeError) as error:
                raise GuestError(
                    f"sandbox {guest.sandbox_id} does not say what changed in it",
                    why=str(error),
                    code="guest_changes",
                ) from error
    return found


def _entry(said: Mapping[str, Any] | None) -> Entry | None:
    return Entry(**said) if said is not None else None


@asynccontextmanager
async def _guest(client: Client, key: str) -> AsyncGenerator[tuple[Guest, str]]:
    """One that runs, and the image below it."""
    try:
        found = await client.sandbox(key)
    except NotFound:
        found, source = None, key
    else:
        if found["state"] == "running":
            yield Guest(client, found), await _image(client, key)
            return
        source = (await client.lineage(key))["snapshot"]
    try:
        made = await client.create(
            source, timeout=LIFETIME, allow_internet_access=False, metadata={"agentenv.diff": key}
        )
    except NotFound as error:
        if found is not None:
            raise
        raise NotFound(
            f"{key} is neither a sandbox nor a snapshot or template", code="not_found"
        ) from error
    try:
        yield Guest(client, made), await _image(client, made["sandboxID"])
    finally:
        with suppress(NotFound):
            await client.kill(made["sandboxID"])


async def _image(client: Client, sandbox_id: str) -> str:
    return str((await client.inspect(sandbox_id))["image_id"])
