"""A thousand stacks at once, and one of a million extents: what they take, and that they are right."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.blocks import (
    BLOCK,
    BlockServer,
    Store,
    all_closed,
    block_folder,
    block_server,
)

from agentenv import _core

MIB = 1 << 20


@pytest.fixture
async def folder():
    async with block_folder("/dev/shm") as made:  # a thousand layers are not made durable here
        yield made


def private(server: BlockServer) -> int:
    """Bytes of memory that are the server's alone."""
    lines = Path(f"/proc/{server.pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines[1:]}
    return sizes["Private_Dirty:"] + sizes["Private_Clean:"]


async def test_a_thousand_stacks(folder: Path, store: Store):
    """The promise is below 100 MB for all of them."""
    base = store.write({n: bytes([n + 1]) * BLOCK for n in range(200)}, 200)
    tops = [store.write({number % 200: os.urandom(BLOCK)}, 200) for number in range(1000)]
    async with block_server(folder, store.url) as server:
        files = [
            (await server.open([base, top], f"holder {number}"), top)
            for number, top in enumerate(tops)
        ]
        held = private(server)
        print(f"{len(files)} stacks open: {held / MIB:.1f} MiB")
        assert held < 60 * MIB
        for (path, wanted), top in random.Random(1).sample(files, 50):
            (block,) = top.content
            with path.open("rb") as file:
                for at in (block * BLOCK, (block * BLOCK + 50 * BLOCK) % (200 * BLOCK)):
                    assert os.pread(file.fileno(), BLOCK, at) == wanted[at : at + BLOCK]
        stats = await server.client.stats()
        assert (stats["stacks"], stats["open_layers"]) == (1000, 1001)
        assert private(server) < 100 * MIB
        server.end()
        await server.start()
        assert (await server.client.stats())["stacks"] == 1000
        print(f"after a restart: {private(server) / MIB:.1f} MiB")
        assert private(server) < 60 * MIB
        await server.client.keep_only(set())
        await all_closed(server)


async def test_a_million_extents_in_layers(folder: Path, store: Store):
    layers, each = 32, 32_000
    blocks = 2 * each * layers
    source = folder / "sparse"
    # One block after another by turns: each layer has each 64th, and a hole behind each.
    noise = [os.urandom(BLOCK) for _ in range(8)]
    with source.open("wb") as file:
        file.writelines(noise)
    written = list[str]()
    for number in range(layers):
        spans = [
            (2 * (number + layers * extent), 1, (number + extent) % 8 * BLOCK)
            for extent in range(each)
        ]
        made = _core.write_layer(
            source, blocks, spans, 64, lambda ids: [store.known.get(i) for i in ids], folder / "p"
        )
        if made.pack:
            store.objects.put_file(f"pack/{made.pack[0]}", folder / "p")
        store.objects.put(f"layer/{made.layer.id}", made.layer.encode())
        written.append(made.layer.id)
        store.known.update({chunk[0]: chunk for chunk in made.layer.chunks()})
    async with block_server(folder, store.url) as server:
        path = await server.client.open_stack(blocks, [(id, 0) for id in written], "one")
        print(f"10^6 extents: {private(server) / MIB:.1f} MiB")
        assert private(server) < 500 * MIB
        rng = random.Random(3)
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(100):
                block = rng.randrange(blocks)
                number, extent = block // 2 % layers, block // 2 // layers
                wanted = noise[(number + extent) % 8] if block % 2 == 0 else bytes(BLOCK)
                assert os.pread(file.fileno(), BLOCK, block * BLOCK) == wanted
