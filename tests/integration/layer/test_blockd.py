"""The block server's files against plain ones: content, holders, sharing, passthrough, restarts."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from tests.blocks import (
    BLOCK,
    BlockServer,
    Store,
    all_closed,
    block_server,
    drop_pages,
    extents,
    noise,
)

from agentenv.errors import ImageError, InfraError


@pytest.fixture
async def server(folder: Path, store: Store):
    async with block_server(folder, store.url) as running:
        yield running


def random_stack(store: Store, seed: int, depth: int = 12, blocks: int = 600):
    rng = random.Random(seed)
    base = [(store.write(extents(rng, blocks, 0.8), blocks), 0)]
    for number in range(depth - 1):
        length = rng.randint(1, blocks)
        window = (0, 32, 16)[number % 3]
        layer = store.write(extents(rng, length, 0.3, 24), length, window)
        base.append((layer, rng.randint(0, blocks - length)))
    return base


def compare(path: Path, wanted: bytes, rng: random.Random, reads: int = 200) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        assert os.fstat(fd).st_size == len(wanted)
        for _ in range(reads):
            at = rng.randint(0, len(wanted))
            size = rng.choice((1, 100, BLOCK, 3 * BLOCK + 5, 300_000))
            assert os.pread(fd, size, at) == wanted[at : at + size], (at, size)
    finally:
        os.close(fd)


async def test_a_stack_reads_as_the_plain_file_it_means(server: BlockServer, store: Store):
    for seed in range(3):
        path, wanted = await server.open(random_stack(store, seed), blocks=700)
        compare(path, wanted, random.Random(seed))
        drop_pages(path)
        assert path.read_bytes() == wanted
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == wanted


async def test_threads_read_at_once(server: BlockServer, store: Store):
    path, wanted = await server.open(random_stack(store, 7))
    failed = list[BaseException]()

    def work(seed: int) -> None:
        try:
            compare(path, wanted, random.Random(seed), 60)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert not failed, failed


async def test_nothing_can_be_written(server: BlockServer, store: Store):
    path, _ = await server.open([store.write(noise(1, 4), 4)])
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        with pytest.raises(OSError) as caught:
            os.open(path, flags)
        assert caught.value.errno in (errno.EROFS, errno.EACCES)


async def test_holders_keep_a_stack_and_its_name(server: BlockServer, store: Store):
    layer = store.write(noise(1, 40), 40)
    path, wanted = await server.open([layer], "one")
    again, _ = await server.open([layer], "two")
    other, _ = await server.open([store.write(noise(2, 4), 4)], "two")
    assert again == path != other
    assert {each.name for each in server.mount.iterdir()} == {path.name, other.name}
    await server.client.close("one")
    assert path.read_bytes() == wanted
    await server.client.keep_only({"one"})
    assert not path.exists() and not other.exists() and not list(server.mount.iterdir())
    await server.client.close("nobody")
    await all_closed(server)


async def test_an_open_file_outlives_its_holders_and_a_restart(server: BlockServer, store: Store):
    layer = store.write(extents(random.Random(3), 300), 300)
    path, wanted = await server.open([layer, store.write(noise(9, 3), 3)])
    with path.open("rb") as file:
        assert file.read(BLOCK) == wanted[:BLOCK]
        server.end()
        await server.start()
        await server.client.close("one")
        assert not path.exists()
        server.end()
        await server.start()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), len(wanted), 0) == wanted
        # Opened again while the old file is open: the same file.
        again, _ = await server.open([layer, store.write(noise(9, 3), 3)], "two")
        assert again.stat().st_ino == os.fstat(file.fileno()).st_ino
        await server.client.close("two")
    await all_closed(server)


async def test_what_cannot_be_opened_is_refused_and_leaves_nothing(
    server: BlockServer, store: Store
):
    layer = store.write(noise(1, 8), 8)
    with pytest.raises(ImageError) as caught:
        await server.client.open_stack(8, [(layer.id, 0), ("0" * 64, 0)], "one")
    assert caught.value.code == "image_incomplete"
    for blocks, ids in ((7, [(layer.id, 0)]), (8, [("x", 0)]), (8, [(layer.id, 1)])):
        with pytest.raises(InfraError):
            await server.client.open_stack(blocks, ids, "one")
    table = store.file("layer", store.write(noise(2, 8), 8).id)
    table.write_bytes(table.read_bytes()[:-1] + b"!")
    with pytest.raises(InfraError):
        await server.client.open_stack(8, [(table.name, 0)], "one")
    stats = await server.client.stats()
    assert (stats["stacks"], stats["open_layers"]) == (0, 0)


async def test_first_use_is_what_another_server_prefetches(
    server: BlockServer, store: Store, folder: Path
):
    layers = [store.write(noise(1, 600), 600), store.write(noise(2, 100), 100)]
    path, wanted = await server.open(layers)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for block in (500, 20, 300):
            assert os.pread(file.fileno(), 10, block * BLOCK)
    used = await server.client.first_use(path)
    assert [layer for layer, _ in used] == [0, 1, 0]
    assert await server.client.first_use(path) == []
    async with block_server(folder, store.url, "b") as other:
        path, wanted = await other.open(layers)
        await other.client.prefetch(path, [*used, (7, 1), (0, 1 << 30)])
        while (await other.fetched())["fetched_chunks"] < 3:
            await asyncio.sleep(0.01)
        while (await other.client.stats())["under_way"]:
            await asyncio.sleep(0.01)
        before = await other.fetched()
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for block in (500, 20, 300):
                part = os.pread(file.fileno(), 10, block * BLOCK)
                assert part == wanted[block * BLOCK :][:10]
        assert await other.fetched() == before


async def test_a_whole_layer_is_left_to_the_kernel(server: BlockServer, store: Store):
    layer = store.write(extents(random.Random(5), 500), 500)
    path, wanted = await server.open([layer])
    assert path.read_bytes() == wanted
    stats = await server.client.stats()
    assert stats["passthrough"] == 0
    while not server.cached("whole"):
        await asyncio.sleep(0.01)
    drop_pages(path)  # opens and closes it: the next to open decides anew
    with path.open("rb") as file, path.open("rb") as second:
        assert (await server.client.stats())["passthrough"] == 1
        hits = (await server.client.stats())["cache_hits"]
        assert file.read() == wanted and os.pread(second.fileno(), 99, 5) == wanted[5:104]
        assert (await server.client.stats())["cache_hits"] == hits
        server.end()
        assert os.pread(file.fileno(), len(wanted), 0) == wanted  # nobody serves
        await server.start()
        with path.open("rb") as third:
            assert third.read() == wanted
        assert (await server.client.stats())["passthrough"] == 1
    await server.client.close("one")
    await all_closed(server)


async def test_a_file_served_before_a_restart_stays_served_while_open(
    server: BlockServer, store: Store
):
    layer = store.write(noise(5, 100), 100)
    path, wanted = await server.open([layer])
    with path.open("rb") as file:
        assert file.read() == wanted
        while not server.cached("whole"):
            await asyncio.sleep(0.01)
        server.end()
        await server.start()
        with path.open("rb") as second:  # as the first: the kernel refuses to mix
            assert second.read() == wanted
    assert (await server.client.stats())["passthrough"] == 0


async def test_common_chunks_come_once(server: BlockServer, store: Store, folder: Path):
    shared = noise(1, 400)
    one = store.write(shared, 400)
    # The same content at another place in another layer: its chunks are referenced.
    moved = {block + 100: data for block, data in shared.items()} | {3: b"x" * BLOCK}
    two = store.write(moved, 500)
    path, wanted = await server.open([one])
    assert path.read_bytes() == wanted
    first = (await server.fetched())["fetched_bytes"]
    path, wanted = await server.open([two])
    assert path.read_bytes() == wanted
    fetched = (await server.fetched())["fetched_bytes"]
    assert fetched - first < 0.3 * first, (first, fetched)


async def test_readers_of_one_chunk_fetch_it_once(server: BlockServer, store: Store):
    layer = store.write(noise(1, 32), 32, 32)
    path, wanted = await server.open([layer])
    found = list[bytes]()

    def read(block: int) -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            found.append(os.pread(file.fileno(), BLOCK, block * BLOCK))

    await asyncio.gather(*(asyncio.to_thread(read, block) for block in range(16)))
    assert sorted(found) == sorted(wanted[n * BLOCK :][:BLOCK] for n in range(16))
    assert (await server.fetched())["fetched_chunks"] == 1


async def test_reading_on_asks_ahead(server: BlockServer, store: Store):
    size = 2048
    layer = store.write(noise(1, size), size, 32)
    path, wanted = await server.open([layer])
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # the kernel's own off
        for block in range(0, size, 8):
            part = os.pread(file.fileno(), 8 * BLOCK, block * BLOCK)
            assert part == wanted[block * BLOCK :][: 8 * BLOCK]
    fetched = await server.fetched()
    assert fetched["fetched_chunks"] == size // 32
    # As many as chunks without; how many fewer depends on how fast the reader is.
    assert fetched["requests"] < size // 32, fetched


async def test_a_restart_keeps_the_cache(server: BlockServer, store: Store):
    layers = random_stack(store, 11)
    path, wanted = await server.open(layers)
    assert path.read_bytes() == wanted
    while (await server.client.stats())["under_way"]:
        await asyncio.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGKILL):
        server.end(number)
        await server.start()
        assert path.exists()
        drop_pages(path)
        assert path.read_bytes() == wanted
        assert (await server.fetched())["fetched_bytes"] == 0
