"""Homes on one store, without servers: each writes layers, claims them, collects."""

import json
import random
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.layer.layers import BLOCK, BY_CONTENT, Layers, Part
from agentenv.store import lease as leases
from agentenv.store.claims import Claims
from agentenv.store.collection import Collection
from agentenv.store.drafts import Drafts
from agentenv.store.objects import CoreObjects, open_objects
from agentenv.store.sql import SqlRecords
from agentenv.store.statistics import verify_store


def noise(seed: int, blocks: int) -> bytes:
    return random.Random(seed).randbytes(blocks * BLOCK)


@dataclass
class Home:
    folder: Path
    objects: CoreObjects
    records: SqlRecords
    layers: Layers
    claims: Claims
    collection: Collection

    async def write(self, content: bytes, lease: leases.Lease, window: int = BY_CONTENT) -> Part:
        async with self.layers.drafts.draft() as draft:
            draft.path.write_bytes(content)
            blocks = len(content) // BLOCK
            return await self.layers.write(draft.path, [(0, blocks, 0)], blocks, window, lease)

    async def add(self, name: str, content: bytes) -> Part:
        """Write a layer and claim it."""
        async with leases.hold(self.objects) as lease:
            part = await self.write(content, lease)
            lease.check()
            await self.claims.put(name, [f"layer/{part.layer}"])
        return part

    async def read(self, part: Part) -> bytes:
        async with self.layers.drafts.draft() as draft:
            await self.layers.unpack([part], draft.path)
            return draft.path.read_bytes()

    async def keys(self, prefix: str = "") -> list[str]:
        return [entry.key for entry in await self.objects.list(prefix)]

    async def whole(self) -> bool:
        """Everything that is claimed is there and right; says what is not."""
        faults = (await verify_store(self.objects)).faults
        print(faults)
        return not faults


@asynccontextmanager
async def home_on(url: str, folder: Path, name: str = "home"):
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as held:
        records = await SqlRecords.open_sqlite(folder / "state.db")
        held.push_async_callback(records.close)
        objects, drafts = await open_objects(url), Drafts(folder / "drafts")
        yield Home(
            folder,
            objects,
            records,
            Layers(objects, records.chunks, drafts, folder / "cache"),
            Claims(objects, name),
            Collection(objects, records.chunks, drafts),
        )


def child_script(body: str, url: str, folder: Path) -> list[str]:
    """A program that runs ``body`` with a ``home``."""
    indented = "\n".join(f"        {line}" for line in body.strip().splitlines())
    text = f"""
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, {json.dumps(str(Path(__file__).parents[3]))})
from tests.contract.store.homes import *
async def main():
    async with home_on({json.dumps(url)}, Path({json.dumps(str(folder))})) as home:
{indented}
asyncio.run(main())
"""
    return [sys.executable, "-c", text]
