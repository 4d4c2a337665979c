"""A store that is down, slow, incomplete or lying: who fails, who waits, who notices, who goes on."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.layer.blockd import DISK, MEMORY, Fault
from tests.blocks import (
    BLOCK,
    BlockServer,
    Layer,
    Store,
    block_server,
    drop_pages,
    noise,
    settled,
    small_disk,
)
from tests.proxy import proxy
from tests.s3 import s3_server

BLOCKS = 96  # three chunks


def write(store: Store, seed: int) -> Layer:
    return store.write(noise(seed, BLOCKS), BLOCKS, 32)


def read(path: Path, block: int = 40) -> bytes:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(file.fileno(), BLOCK, block * BLOCK)


def fails(path: Path) -> None:
    with pytest.raises(OSError) as caught:
        read(path)
    assert caught.value.errno == errno.EIO


async def told(server: BlockServer, wanted: Callable[[list[Fault]], bool]) -> list[Fault]:
    version, faults = await server.client.faults()
    async with asyncio.timeout(20):
        while not wanted(faults):
            version, faults = await server.client.faults(version, 5.0)
    return faults


def hide(pack: Path) -> Callable[[], None]:
    away = pack.with_suffix(".away")
    pack.rename(away)
    return lambda: drop(away.rename(pack))


def cut_short(pack: Path) -> Callable[[], None]:
    whole = pack.read_bytes()
    pack.chmod(0o600)
    pack.write_bytes(whole[: len(whole) // 4])
    return lambda: drop(pack.write_bytes(whole))


def spoil(pack: Path) -> Callable[[], None]:
    whole = pack.read_bytes()
    pack.chmod(0o600)
    pack.write_bytes(bytes(byte ^ 0x55 for byte in whole))
    return lambda: drop(pack.write_bytes(whole))


def hang(pack: Path) -> Callable[[], None]:
    """Whoever opens it waits, as on a network's file system that does not answer."""
    away = pack.with_suffix(".away")
    pack.rename(away)
    os.mkfifo(pack)

    def mend() -> None:
        writer = os.open(pack, os.O_RDWR | os.O_NONBLOCK)
        away.rename(pack)
        os.close(writer)

    return mend


def drop(_: object) -> None: ...


@pytest.mark.parametrize("hurt", [hide, cut_short, spoil])
async def test_reads_of_a_disk_fail_and_recover(folder: Path, store: Store, hurt):
    bad, good = write(store, 1), write(store, 2)
    assert bad.pack
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open([bad], "guest")
        other, fine = await server.open([good], "neighbour")
        mend = hurt(store.file("pack", bad.pack))
        await asyncio.to_thread(fails, path)
        (fault,) = await told(server, bool)
        assert fault.failed and fault.holders == ("guest",) and fault.stack == path.name
        assert f"pack/{bad.pack}" in fault.cause
        assert await asyncio.to_thread(other.read_bytes) == fine
        await asyncio.to_thread(fails, path)
        mend()
        await told(server, lambda faults: not faults)  # without a new read
        assert await asyncio.to_thread(path.read_bytes) == wanted


@pytest.mark.parametrize("hurt", [hide, cut_short, spoil])
async def test_reads_of_memory_wait_and_go_on(folder: Path, store: Store, hurt):
    bad, good = write(store, 1), write(store, 2)
    assert bad.pack
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open([bad], "guest", MEMORY)
        other, fine = await server.open([good], "neighbour")
        mend = hurt(store.file("pack", bad.pack))
        reading = asyncio.create_task(asyncio.to_thread(path.read_bytes))
        (fault,) = await told(server, bool)
        assert not fault.failed and f"pack/{bad.pack}" in fault.cause
        assert await asyncio.to_thread(other.read_bytes) == fine
        assert not reading.done()
        mend()
        assert await reading == wanted
        await told(server, lambda faults: not faults)


WAITER = """
import mmap, os, sys
file = open(sys.argv[1], "rb")
print("here", flush=True)
if sys.argv[2] != "read":
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    if sys.argv[2] == "alone":
        mapped.madvise(mmap.MADV_RANDOM)
    mapped[40 * 4096]
else:
    os.pread(file.fileno(), 4096, 40 * 4096)
print("read", flush=True)
"""


@pytest.mark.parametrize("way", ["read", "fault", "alone"])
async def test_who_waits_for_memory_can_be_killed(folder: Path, store: Store, way: str):
    layer = write(store, 1)
    assert layer.pack
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open([layer], "guest", MEMORY)
        mend = hide(store.file("pack", layer.pack))
        argv = (sys.executable, "-c", WAITER, str(path), way)
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as waiter:
            assert waiter.stdout and waiter.stdout.readline() == b"here\n"
            (fault,) = await told(server, bool)
            assert not fault.failed
            waiter.send_signal(signal.SIGKILL)
            assert await asyncio.to_thread(waiter.wait, 20) == -signal.SIGKILL
        if way == "alone":  # the kernel's read-ahead waits on, whoever is gone
            await told(server, lambda faults: not faults)
            await settled(server)
        mend()
        await settled(server)
        assert await asyncio.to_thread(path.read_bytes) == wanted


async def test_one_who_maps_a_disk_has_it_wait_for_all(folder: Path, store: Store):
    layer = write(store, 1)
    assert layer.pack
    async with block_server(folder, store.url, patience=0.1) as server:
        path, wanted = await server.open([layer], "a", DISK)
        again, _ = await server.open([layer], "b", MEMORY)
        assert again == path
        server.end()
        await server.start()
        mend = hide(store.file("pack", layer.pack))
        reading = asyncio.create_task(asyncio.to_thread(path.read_bytes))
        await told(server, bool)
        mend()
        assert await reading == wanted


async def test_a_wait_without_end_ends_when_nobody_holds_the_stack(folder: Path, store: Store):
    """Else whoever unmounts it would wait for the store. A holder who comes makes reads wait."""
    layer = write(store, 1)
    assert layer.pack
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open([layer], "a", MEMORY)
        mend = hide(store.file("pack", layer.pack))
        with path.open("rb", buffering=0) as file:
            reading = asyncio.create_task(asyncio.to_thread(file.read))
            await told(server, bool)
            await server.client.close("a")
            with pytest.raises(OSError, match="Input/output error"):
                await reading
            await server.open([layer], "b", MEMORY)
            reading = asyncio.create_task(asyncio.to_thread(file.read))
            await told(server, bool)
            mend()
            assert await reading == wanted


async def test_a_store_that_hangs_stops_no_other_stack(folder: Path, store: Store):
    """More reads hang than there are threads to answer the kernel."""
    bad, good = [write(store, n) for n in range(8)], write(store, 9)
    packs = [store.file("pack", layer.pack) for layer in bad if layer.pack]
    async with block_server(folder, store.url) as server:
        stacks = [await server.open([layer], f"guest-{layer.id}", MEMORY) for layer in bad]
        other, fine = await server.open([good], "neighbour")
        mends = [hang(pack) for pack in packs]
        readings = [asyncio.create_task(_read_all(path)) for path, _ in stacks]
        faults = await told(server, lambda faults: len(faults) == len(bad))
        assert {fault.cause for fault in faults} == {"the store does not answer"}
        assert await _read_all(other) == fine
        for mend in mends:
            mend()
        for reading, (_, wanted) in zip(readings, stacks, strict=True):
            assert await reading == wanted
        await told(server, lambda faults: not faults)


async def test_many_dead_reads_do_not_starve_others(folder: Path, store: Store):
    """More chunks of a dead pack are waited for than may be on their way at once."""
    blocks = 256
    bad = [store.write(noise(100 + n, blocks), blocks, 32) for n in range(72)]
    good = write(store, 1)
    packs = [store.file("pack", layer.pack) for layer in bad if layer.pack]
    async with block_server(folder, store.url) as server:
        stacks = [await server.open([layer], "guest", MEMORY) for layer in bad]
        other, fine = await server.open([good], "neighbour")
        mends = [hide(pack) for pack in packs]
        readings = [asyncio.create_task(_read_all(path)) for path, _ in stacks]
        async with asyncio.timeout(20):
            while len((await server.client.faults())[1]) < len(bad):
                await asyncio.sleep(0.05)
            assert await _read_all(other) == fine
        for mend in mends:
            mend()
        for reading, (_, wanted) in zip(readings, stacks, strict=True):
            assert await reading == wanted


async def _read_all(path: Path) -> bytes:
    """In a process of its own: threads of ours are few, and a waiting one holds up our exit."""
    child = await asyncio.create_subprocess_exec("cat", path, stdout=subprocess.PIPE)
    return (await child.communicate())[0]


async def test_a_prefetch_holds_up_no_reader(folder: Path, monkeypatch):
    blocks = 8192
    async with s3_server() as s3:
        for name, value in s3.keys.items():
            monkeypatch.setenv(name, value)
        with proxy(s3.port) as line:
            url = s3.url(endpoint=f"http://localhost:{line.port}", timeout="60")
            layer = Store(url, folder).write(noise(1, blocks), blocks, 32)
            line.rate = 12e6  # the prefetch takes three seconds
            async with block_server(folder, url) as server:
                path, wanted = await server.open([layer])
                chunks = [(0, number) for number in range(blocks // 32)]
                await server.client.prefetch(path, chunks)
                last = blocks - 1
                assert await asyncio.to_thread(read, path, last) == wanted[last * BLOCK :]
                assert (await server.client.stats())["under_way"] > len(chunks) // 4


async def test_a_real_server_that_dies_hangs_and_lies(folder: Path, monkeypatch):
    async with s3_server() as s3:
        for name, value in s3.keys.items():
            monkeypatch.setenv(name, value)
        with proxy(s3.port) as line:
            url = s3.url(endpoint=f"http://localhost:{line.port}", timeout="3")
            store = Store(url, folder)
            layers = [write(store, n) for n in range(4)]
            async with block_server(folder, url, patience=1.0) as server:
                opened = [await server.open([layer], str(n)) for n, layer in enumerate(layers)]
                s3.kill()
                await asyncio.to_thread(fails, opened[0][0])
                assert (await told(server, bool))[0].failed
                s3.start()
                await told(server, lambda faults: not faults)
                assert await asyncio.to_thread(opened[0][0].read_bytes) == opened[0][1]
                line.latency = 30.0  # nothing comes
                await asyncio.to_thread(fails, opened[1][0])
                (fault,) = await told(server, bool)
                assert fault.failed and fault.cause
                line.latency = 0.0
                line.cut()
                line.mend()
                await told(server, lambda faults: not faults)
                assert await asyncio.to_thread(opened[1][0].read_bytes) == opened[1][1]
                line.corrupt = True
                await asyncio.to_thread(fails, opened[2][0])
                assert (await server.fetched())["damaged_chunks"] > 0
                line.corrupt = False
                await told(server, lambda faults: not faults)
                assert await asyncio.to_thread(opened[2][0].read_bytes) == opened[2][1]


async def test_one_wrong_answer_is_no_failure(folder: Path, store: Store):
    layer = write(store, 1)
    assert layer.pack
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open([layer])
        mend = spoil(store.file("pack", layer.pack))
        reading = asyncio.create_task(asyncio.to_thread(path.read_bytes))
        async with asyncio.timeout(10):
            while not (await server.fetched())["damaged_chunks"]:
                await asyncio.sleep(0.001)
        mend()
        assert await reading == wanted


async def test_a_full_disk_only_keeps_nothing(folder: Path, store: Store):
    layers = [store.write(noise(n, 256), 256, 32) for n in range(8)]
    with small_disk(folder / "disk", 2 << 20) as disk:
        async with block_server(folder, store.url, cache=disk / "cache") as server:
            stacks = [await server.open([layer], str(n)) for n, layer in enumerate(layers)]
            for _ in range(2):
                for path, wanted in stacks:
                    assert await asyncio.to_thread(path.read_bytes) == wanted
                    drop_pages(path)
            assert (await server.client.stats())["eviction"]["unkept"] > 0
            # Nothing fits, not even a table; a restart finds them all the same.
            fd = os.open(disk / "rest", os.O_WRONLY | os.O_CREAT)
            with pytest.raises(OSError, match="No space"):
                while True:
                    os.write(fd, bytes(BLOCK))
            os.close(fd)
            late = store.write(noise(99, 8), 8)
            path, wanted = await server.open([late], "late")
            away = folder / "store.away"
            server.end()
            (folder / "store" / "layer").rename(away)
            await server.start()
            assert await asyncio.to_thread(path.read_bytes) == wanted
            away.rename(folder / "store" / "layer")


async def test_a_map_is_filled_when_the_store_is_back(folder: Path, store: Store):
    layer = write(store, 3)
    assert layer.pack
    async with block_server(folder, store.url, patience=0.1) as server:
        path, wanted = await server.open([layer], "guest", MEMORY)
        mend = hide(store.file("pack", layer.pack))
        argv = (sys.executable, "-c", WAITER, str(path), "fault")
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as waiter:
            await told(server, bool)
            assert waiter.poll() is None
            mend()
            assert await asyncio.to_thread(waiter.wait, 20) == 0
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == wanted
