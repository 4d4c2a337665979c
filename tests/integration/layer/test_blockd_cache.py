"""The block server's cache: bounds, pins, what goes first, damage on disk, layers put there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.blocks import (
    BLOCK,
    MIB,
    BlockServer,
    Layer,
    Store,
    block_server,
    drop_pages,
    noise,
    settled,
    small_disk,
)
from tests.waiting import until

LAYER = MIB // BLOCK  # blocks


@pytest.fixture
def layers(store: Store) -> list[Layer]:
    """Ten of 1 MiB that do not compress."""
    return [store.write(noise(number, LAYER), LAYER, 32) for number in range(10)]


async def read_and_close(server: BlockServer, layer: Layer, holder: str = "one") -> None:
    path, wanted = await server.open([layer], holder)
    assert path.read_bytes() == wanted
    await settled(server)
    await server.client.close(holder)


async def test_what_was_closed_first_goes_first(folder: Path, store: Store, layers: list[Layer]):
    async with block_server(folder, store.url, size=4 * MIB) as server:
        for number in (0, 1, 2, 0, 3, 4):
            await read_and_close(server, layers[number])
            assert (await server.client.stats())["cache_bytes"] <= 4 * MIB
        until(lambda: sum(path.stat().st_blocks * 512 for path in server.cached("data")) <= 4 * MIB)
        here = {path.stem for path in server.cached("data")}
        assert {layers[n].id for n in (0, 3, 4)} <= here and layers[1].id not in here
        before = (await server.fetched())["fetched_bytes"]
        await read_and_close(server, layers[0])
        assert (await server.fetched())["fetched_bytes"] == before
        assert (await server.client.stats())["eviction"]["evicted_bytes"] >= MIB


async def test_the_order_outlives_a_restart_and_a_rescan(
    folder: Path, store: Store, layers: list[Layer]
):
    async with block_server(folder, store.url, size=4 * MIB) as server:
        for number in (0, 1, 2, 0):
            await read_and_close(server, layers[number])
        server.end()
        await server.start()
        await server.client.rescan()
        for number in (3, 4):
            await read_and_close(server, layers[number])
        here = {path.stem for path in server.cached("data")}
        assert layers[0].id in here and layers[1].id not in here


async def test_what_is_open_stays_and_what_has_no_room_is_served(
    folder: Path, store: Store, layers: list[Layer]
):
    async with block_server(folder, store.url, size=2 * MIB) as server:
        first, wanted = await server.open([layers[0], (layers[1], LAYER)], "pinned")
        assert first.read_bytes() == wanted
        second, other = await server.open([layers[2], (layers[3], LAYER)], "late")
        assert second.read_bytes() == other
        stats = await settled(server)
        assert stats["cache_bytes"] <= 2 * MIB and stats["eviction"]["evicted_bytes"] == 0
        assert stats["eviction"]["unkept"] > 0
        drop_pages(second)
        assert second.read_bytes() == other
        await server.client.close("pinned")
        await read_and_close(server, layers[4])
        assert {layers[4].id} <= {path.stem for path in server.cached("data")}


async def test_so_much_stays_free_on_the_disk(folder: Path, store: Store, layers: list[Layer]):
    with small_disk(folder / "disk", 16 * MIB) as disk:
        async with block_server(folder, store.url, cache=disk / "cache", free=12 * MIB) as server:
            for layer in layers:
                await read_and_close(server, layer)
                found = os.statvfs(disk)
                assert found.f_bavail * found.f_frsize >= 12 * MIB - MIB // 16  # and tables
            assert len(server.cached("data")) >= 3, server.cached("data")
            # Others took what must stay free: closed layers make room.
            found = os.statvfs(disk)
            (disk / "others").write_bytes(bytes(found.f_bavail * found.f_frsize - MIB))
            server.end()
            await server.start()
            assert not server.cached("data")


async def test_damage_on_disk_is_found_and_fetched_again(
    folder: Path, store: Store, layers: list[Layer]
):
    stack = layers[:3]
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open(stack)
        assert path.read_bytes() == wanted
        await settled(server)
        until(lambda: len(server.cached("whole")) == 1)  # only the upper one is seen
        data = next(path for path in server.cached("data") if path.stem == stack[2].id)
        for hurt in (_flip, _cut, _lose, _other):
            server.end()
            hurt(data)
            await server.start()
            drop_pages(path)
            assert path.read_bytes() == wanted, hurt
            assert (await settled(server))["fetch"]["fetched_bytes"] > 0, hurt
            drop_pages(path)
            assert path.read_bytes() == wanted
            await settled(server)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(40 * BLOCK + 7)
        file.write(b"!")


def _cut(path: Path) -> None:
    os.truncate(path, 20 * BLOCK + 5)


def _lose(path: Path) -> None:
    path.unlink()


def _other(path: Path) -> None:
    path.write_bytes(os.urandom(3 * MIB))


async def test_a_file_cut_under_a_running_server_does_no_harm(
    folder: Path, store: Store, layers: list[Layer]
):
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open([layers[0], (layers[1], LAYER)])
        assert path.read_bytes() == wanted
        await settled(server)
        for data in server.cached("data"):
            os.truncate(data, 0)
        drop_pages(path)
        assert path.read_bytes() == wanted


async def test_foreign_files_do_no_harm_and_are_left(
    folder: Path, store: Store, layers: list[Layer]
):
    cache = folder / "a" / "cache"
    (cache / "docs").mkdir(parents=True)
    (cache / "00").mkdir()
    foreign = [cache / "docs" / "a.txt", cache / "note", cache / "00" / "x.data"]
    for path in foreign:
        path.write_text("mine")
    name = layers[0].id
    folder_of = cache / name[:2]
    folder_of.mkdir(exist_ok=True)
    (folder_of / f"{name}.table").write_bytes(b"no table")
    (folder_of / f"{name}.data").write_bytes(b"no data")
    (folder_of / f"{name}.whole").touch()
    left = folder_of / f"{name}.draft-7"
    left.touch()
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open([layers[0]])
        assert path.read_bytes() == wanted
        assert not left.exists()
        assert all(path.read_text() == "mine" for path in foreign)


async def test_a_layer_that_was_put_here_is_not_fetched(
    folder: Path, store: Store, layers: list[Layer]
):
    async with block_server(folder, store.url) as server:
        name = layers[0].id
        place = server.options.cache / name[:2] / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_suffix(".data").open("wb") as file:
            for _, data in sorted(layers[0].content.items()):
                file.write(data or bytes(BLOCK))
        shutil.copyfile(store.file("layer", name), place.with_suffix(".table"))
        place.with_suffix(".whole").touch()
        await server.client.rescan()
        assert (await server.client.stats())["cache_bytes"] == MIB
        path, wanted = await server.open([layers[0]])
        assert path.read_bytes() == wanted
        stats = await server.client.stats()
        assert stats["fetch"]["fetched_bytes"] == 0 and stats["cache_bytes"] == MIB
