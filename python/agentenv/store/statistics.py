"""What the store holds, and whether all of it is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentenv.errors import InfraError
from agentenv.store.claims import all_claims, read_claims
from agentenv.store.collection import MAX_TABLE, Collection
from agentenv.store.objects import CoreObjects

if TYPE_CHECKING:
    from agentenv import _core

BLOCK = 4096
VERIFIED_AT_ONCE = 64  # chunks


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Bytes. ``logical`` is the data of every claimed layer, once for each claim that names it;
    ``unique`` that of its different chunks; ``stored`` all objects of the store."""

    images: int
    layers: int
    logical_bytes: int
    unique_bytes: int
    stored_bytes: int
    saved_bytes: int


async def store_statistics(objects: CoreObjects, collection: Collection) -> StoreStatistics:
    """Reads every claimed table. Raises InfraError."""
    live = await collection.mark()
    claims = await all_claims(objects)
    logical = sum(
        live.layers[key].data_bytes
        for keys in claims.values()
        for key in keys
        if key in live.layers
    )
    chunks = {chunk[0]: chunk[2] for found in live.packs.values() for chunk in found.values()}
    unique = sum(chunks.values()) * BLOCK
    stored = sum(entry.size for entry in await objects.list(""))
    images = {name for name in claims if name.rpartition("/")[2].startswith("image-")}
    return StoreStatistics(
        len(images), len(live.layers), logical, unique, stored, max(0, logical - stored)
    )


class Server(Protocol):
    """The block server, asked for its figures."""

    async def stats(self) -> dict[str, Any]: ...


async def cache_statistics(server: Server, cache: Path) -> dict[str, Any]:
    """The running block server's figures; without one, what lies in the cache's folder."""
    try:
        found = await server.stats()
    except InfraError:
        held = await asyncio.to_thread(_held, cache)
        return dict.fromkeys(_FIGURES, 0) | {"cache_bytes": held}
    return {
        **{name: found[name] for name in ("cache_bytes", "cache_hits", "cache_misses")},
        **found["fetch"],
        **found["eviction"],
    }


_FIGURES = (
    "cache_bytes", "cache_hits", "cache_misses", "fetched_bytes", "fetched_chunks", "requests",
    "peer_bytes", "damaged_chunks", "evicted_bytes", "unkept",
)  # fmt: skip


def _held(cache: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in cache.glob("??/*.data"))


@dataclass(frozen=True, slots=True)
class Hurt:
    """An object that is not what it should be, and the claims (HOME/KIND-NAME) that need it."""

    key: str
    why: str
    needed_by: list[str]
    discard: str = ""
    """The object to remove, so that a pull makes it again; empty if none would help."""


@dataclass(slots=True)
class Verified:
    layers: int = 0
    chunks: int = 0
    faults: list[Hurt] = field(default_factory=list[Hurt])


async def verify_store(objects: CoreObjects) -> Verified:
    """Check everything that is claimed, byte by byte. Raises InfraError if the store fails."""
    done = Verified()
    users: dict[str, list[str]] = {}
    claims, unreadable = await read_claims(objects)
    done.faults += [Hurt(key, why, []) for key, why in unreadable.items()]
    for name, keys in claims.items():
        for key in keys:
            users.setdefault(key, []).append(name)
    seen: set[tuple[bytes, str]] = set()
    for key, needed_by in sorted(users.items()):
        if key.startswith("layer/"):
            done.layers += 1
            await _verify_layer(objects, key, needed_by, seen, done)
        elif not key.startswith("first-use/") and await objects.head(key) is None:
            done.faults.append(Hurt(key, "it is missing", needed_by))
    return done


async def _verify_layer(
    objects: CoreObjects,
    key: str,
    needed_by: list[str],
    seen: set[tuple[bytes, str]],
    done: Verified,
) -> None:
    from agentenv import _core

    data = await objects.get(key, MAX_TABLE)
    try:
        if data is None:
            raise ValueError("it is missing")
        table = _core.Layer.decode(data)
        if f"layer/{table.id}" != key:
            raise ValueError("it is another layer")
    except ValueError as error:
        done.faults.append(Hurt(key, str(error), needed_by, key if data else ""))
        return
    fresh = [chunk for chunk in table.chunks() if (chunk[0], chunk[4]) not in seen]
    seen.update((chunk[0], chunk[4]) for chunk in fresh)
    done.chunks += len(fresh)
    packs = {chunk[0].hex(): chunk[4] for chunk in fresh}
    for part in _parts(fresh):
        for chunk, why in await objects.with_core(_core.verify_chunks, part):
            place = f"pack/{packs[chunk]}"
            done.faults.append(Hurt(f"{key} chunk {chunk}", why, needed_by, place))


def _parts(chunks: list[_core.Chunk]) -> Iterator[list[_core.Chunk]]:
    for start in range(0, len(chunks), VERIFIED_AT_ONCE):
        yield chunks[start : start + VERIFIED_AT_ONCE]
