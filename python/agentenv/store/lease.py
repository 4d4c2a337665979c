"""Leases and marks: how writers and the collection stay out of each other's way, on any store.

What a writer counts on may be unreferenced until it is done. So it says what it uses, and the
collection says what it is about to delete; each first writes, then looks what the other wrote.

    lease/ID/alive     who holds the lease; written again and again
    lease/ID/uses-N    JSON: keys the holder counts on or writes
    condemned/KEY      about to be deleted; gone soon, with the object or without

A writer that finds what it uses condemned waits until the mark is gone, then looks what is there.
The collection deletes nothing that a lease uses. Of a holder that died the lease expires.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agentenv.concurrency import Tasks
from agentenv.errors import InfraError
from agentenv.host.process import start_time
from agentenv.model import new_id
from agentenv.store.objects import Objects

LEASES, CONDEMNED = "lease/", "condemned/"
# A holder that was silent for so long is dead; longer than any pause of a machine that goes on.
LIFETIME = 900.0
RENEWAL = 60.0  # seconds between signs of life
# A collection deletes within this time from its marks or not at all; older marks are of a dead one.
MARK_LIFETIME = 180.0
MARK_POLL = 0.05
MAX_USES = 64 << 20
MAX_OWNER = 4096
_KEYS = TypeAdapter(set[str])


class Lease:
    """Held by ``hold``."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._folder = f"{LEASES}{new_id()}"
        self._renewed = _clock()
        self._lost = False
        self._used: set[str] = set()
        self._written = 0

    async def use(self, keys: Iterable[str]) -> None:
        """Nothing deletes these keys from now on: what is there stays. Raises InfraError."""
        wanted = set(keys) - self._used
        if not wanted:
            return
        self._written += 1
        data = json.dumps(sorted(wanted)).encode()
        await self._objects.put(f"{self._folder}/uses-{self._written}", data)
        loop = asyncio.get_running_loop()
        patience = loop.time() + MARK_LIFETIME
        while await self._marked(wanted) and loop.time() < patience:
            await asyncio.sleep(MARK_POLL)
        self._used |= wanted

    async def _marked(self, wanted: set[str]) -> bool:
        """Whether a collection that is not known to be dead is about to delete one of these."""
        marks = {e.key.removeprefix(CONDEMNED): e for e in await self._objects.list(CONDEMNED)}
        if not (marked := wanted & marks.keys()):
            return False
        now = await self.now()
        for key in marked:
            owner = await self._objects.get(CONDEMNED + key, MAX_OWNER)
            old = now - marks[key].modified > MARK_LIFETIME
            if owner is not None and not old and not died_here(owner):
                return True
        return False

    def check(self) -> None:
        """Before what was written becomes referenced. Raises InfraError (``lease_lost``) if the
        lease may have been taken for dead."""
        self._lost = self._lost or _clock() - self._renewed > LIFETIME / 2
        if self._lost:
            raise InfraError(
                "the lease on the store was lost",
                why=f"it could not be renewed for {LIFETIME / 2:.0f} s",
                fix="try again",
                code="lease_lost",
            )

    async def renew(self) -> None:
        """Another sign of life. A lease that may have been taken for dead is not brought back."""
        asked = _clock()
        self._lost = self._lost or asked - self._renewed > LIFETIME / 2
        await self._objects.put(f"{self._folder}/alive", own_process())
        self._renewed = asked

    async def now(self) -> float:
        """A time of the store's clock."""
        await self.renew()
        entry = await self._objects.head(f"{self._folder}/alive")
        return entry.modified if entry else 0.0

    async def end(self) -> None:
        parts = ["alive", *(f"uses-{number + 1}" for number in range(self._written))]
        await self._objects.delete([f"{self._folder}/{part}" for part in parts])


@asynccontextmanager
async def hold(objects: Objects) -> AsyncGenerator[Lease]:
    """A lease for as long as the block runs. Raises InfraError."""
    lease, tasks = Lease(objects), Tasks()

    async def keep() -> None:
        while True:
            await asyncio.sleep(RENEWAL)
            with suppress(InfraError):  # `check` tells if it lasts
                await lease.renew()

    try:
        await lease.renew()
        tasks.start(keep(), "renew lease")
        yield lease
    finally:
        await tasks.close()
        with suppress(InfraError):  # it expires
            await asyncio.shield(lease.end())


async def used(objects: Objects, now: float) -> set[str]:
    """What live leases use; those of the dead are removed.

    ``now`` is a time of the store's clock (``Lease.now``).
    """
    keys: set[str] = set()
    folders: dict[str, dict[str, float]] = {}
    for entry in await objects.list(LEASES):
        folder, _, part = entry.key.rpartition("/")
        folders.setdefault(folder, {})[part] = entry.modified
    for folder, parts in folders.items():
        if await _dead(objects, folder, parts, now):
            await objects.delete([f"{folder}/{part}" for part in parts])
            continue
        for part in parts.keys() - {"alive"}:
            keys |= await _uses(objects, f"{folder}/{part}")
    return keys


async def _uses(objects: Objects, key: str) -> set[str]:
    data = await objects.get(key, MAX_USES)
    try:
        return _KEYS.validate_json(data) if data else set()
    except ValidationError as error:
        raise InfraError(
            f"{key} cannot be read, so what its writer uses is not known",
            why=str(error).splitlines()[0],
            fix="if no pull runs anywhere, delete it",
            code="store_damaged",
        ) from error


async def _dead(objects: Objects, folder: str, parts: dict[str, float], now: float) -> bool:
    if now - max(parts.values()) > LIFETIME:
        return True
    data = await objects.get(f"{folder}/alive", MAX_OWNER)
    return data is not None and died_here(data)  # None: just made, or just ended


def own_process() -> bytes:
    """Who this is, for other processes of this machine to see whether it lives."""
    pid = os.getpid()
    host = os.uname().nodename
    return json.dumps({**_world(), "pid": pid, "start": start_time(pid), "host": host}).encode()


def died_here(data: bytes) -> bool:
    """Whether whom ``own_process`` told of was a process of this machine and is gone."""
    try:
        owner = json.loads(data)
        here = {name: owner[name] for name in ("boot", "pids")} == _world()
        return here and start_time(int(owner["pid"])) != owner["start"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False  # of another version: it expires


def _world() -> dict[str, object]:
    """Where a pid means something: this boot, this PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"boot": boot, "pids": Path("/proc/self/ns/pid").stat().st_ino}


def _clock() -> float:
    """Seconds, those of a suspended machine included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
