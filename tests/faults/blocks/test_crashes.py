"""A server that is killed while it is used: readers, maps, holders and what the kernel reads alone."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from agentenv import _core
from agentenv.errors import InfraError
from agentenv.layer.blockd import MEMORY
from agentenv.store.claims import Claims
from agentenv.store.collection import Collection
from agentenv.store.drafts import Drafts
from agentenv.store.objects import CoreObjects
from agentenv.store.sql import SqlRecords
from tests.blocks import (
    BLOCK,
    NAME,
    BlockServer,
    Store,
    all_closed,
    block_server,
    directory_store,
    drop_pages,
    extents,
    noise,
    settled,
)

# Compares what it reads with a plain file until its input ends; a line for the number of rounds.
READER = """
import mmap, os, random, select, sys
path, twin, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
wanted, rng, rounds = open(twin, "rb").read(), random.Random(seed), 0
fd = os.open(path, os.O_RDONLY)
mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
print("begun", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    at, size = rng.randrange(len(wanted)), rng.choice((1, 5000, 400000))
    if rng.random() < 0.3:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    found = os.pread(fd, size, at) if rng.random() < 0.5 else mapped[at : at + size]
    assert found == wanted[at : at + size], (at, size)
    if rng.random() < 0.1:
        with open(path, "rb") as other:
            other.seek(at)
            assert other.read(size) == wanted[at : at + size], (at, size)
    rounds += 1
print(rounds)
"""


@asynccontextmanager
async def readers(path: Path, wanted: bytes, count: int) -> AsyncGenerator[None]:
    """Processes that read ``path`` for as long as this lasts, all of them without a fault."""
    twin = path.parents[1] / f"{path.name}.twin"
    twin.write_bytes(wanted)
    children = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, path, twin, str(seed),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for seed in range(count)
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdout and await child.stdout.readline() == b"begun\n"
        yield
    finally:
        ends = [await asyncio.wait_for(child.communicate(b"end"), 60) for child in children]
    for child, (out, err) in zip(children, ends, strict=True):
        assert child.returncode == 0, err.decode()
        assert int(out) > 0


async def test_readers_notice_no_kill(folder: Path, store: Store):
    rng = random.Random(5)
    layers = [store.write(extents(rng, 4000, 0.9), 4000) for _ in range(3)]
    loop = asyncio.get_running_loop()
    async with block_server(folder, store.url, supervised=True, size=16 << 20) as server:
        path, wanted = await server.open(layers, "guest", MEMORY)
        alone, single = await server.open([store.write(noise(1, 1000), 1000)], "guest")
        assert server.launcher
        async with readers(path, wanted, 2), readers(alone, single, 1):
            begun, kills = loop.time(), 0
            while loop.time() < begun + 12:
                await server.launcher.signal(NAME, signal.SIGKILL)
                kills += 1
                async with asyncio.timeout(20):
                    while (await status(server)).restarts < kills:
                        await asyncio.sleep(0.005)
                await asyncio.sleep(rng.uniform(0.0, 0.4))  # anywhere in the next one's life
            await server.answering()
        assert kills >= 5
        assert (await server.client.stats())["stacks"] == 2
        await server.client.close("guest")
        await all_closed(server)  # an open that was counted twice is noticed in time


async def status(server: BlockServer):
    assert server.launcher
    found = await server.launcher.status(NAME)
    assert found
    return found


async def test_what_waits_is_answered_by_the_next_server(folder: Path, store: Store):
    layer = store.write(noise(1, 200), 200, 32)
    assert layer.pack
    pack = store.file("pack", layer.pack)
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open([layer], "guest", MEMORY)
        pack.rename(folder / "away")
        reading = asyncio.create_task(asyncio.to_thread(path.read_bytes))
        for number in (signal.SIGTERM, signal.SIGKILL):
            async with asyncio.timeout(20):
                while not (await server.client.faults())[1]:
                    await asyncio.sleep(0.02)
            server.end(number)  # politely ended, it fails nobody either
            await server.start()
        assert not reading.done()
        (folder / "away").rename(pack)
        assert await reading == wanted


async def test_holders_maps_and_whole_files_outlive_a_kill(folder: Path, store: Store):
    layers = [store.write(noise(n, 300), 300) for n in range(2)]
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open(layers, "one", MEMORY)
        await server.open(layers, "two", MEMORY)
        whole, single = await server.open(layers[:1], "two")
        assert whole.read_bytes() == single
        await settled(server)
        drop_pages(whole)
        with path.open("rb") as file, whole.open("rb") as passed:
            assert (await server.client.stats())["passthrough"] == 1
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[: 10 * BLOCK] == wanted[: 10 * BLOCK]
                server.end()
                assert os.pread(passed.fileno(), 9000, 77) == single[77:9077]
                await server.start()
                assert mapped[:] == wanted
                await server.client.keep_only({"two"})
                assert path.exists() and whole.read_bytes() == single
                await server.client.close("two")
                assert not path.exists()
                assert mapped[:] == wanted
                assert os.pread(passed.fileno(), len(single), 0) == single
        await all_closed(server)


async def test_a_stack_that_lost_its_table_waits_for_the_store(folder: Path, store: Store):
    layers = [store.write(noise(n, 100), 100) for n in range(2)]
    async with block_server(folder, store.url) as server:
        path, wanted = await server.open(layers[:1], "guest")
        other, fine = await server.open(layers[1:], "neighbour")
        with path.open("rb") as file:
            server.end()
            for table in server.cached("table"):
                if table.stem == layers[0].id:
                    table.unlink()
            (folder / "store" / "layer").rename(folder / "away")
            await server.start()
            assert other.read_bytes() == fine
            _, (fault,) = await server.client.faults()
            assert fault.holders == ("guest",) and not fault.failed
            reading = asyncio.create_task(asyncio.to_thread(os.pread, file.fileno(), 9000, 5))
            await asyncio.sleep(0)
            (folder / "away").rename(folder / "store" / "layer")
            assert await reading == wanted[5:9005]
            assert not (await server.client.faults())[1]
        await server.client.keep_only(set())
        await all_closed(server)


async def test_clients_race(folder: Path, store: Store):
    layers = [store.write(noise(n, 64), 64) for n in range(4)]
    stacks = [layers[:2], layers[1:3], layers[2:], layers[:1]]
    async with block_server(folder, store.url) as server:

        async def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                path, wanted = await server.open(rng.choice(stacks), f"holder {seed}")
                block = rng.randrange(64)
                with path.open("rb") as file:
                    found = os.pread(file.fileno(), 9, block * BLOCK)
                assert found == wanted[block * BLOCK :][:9]
                if rng.random() < 0.7:
                    await server.client.close(f"holder {seed}")
            await server.client.close(f"holder {seed}")

        await asyncio.gather(*(work(seed) for seed in range(6)))
        await all_closed(server)
        assert not list(server.mount.iterdir())


async def test_garbage_on_the_control_socket(folder: Path, store: Store):
    rng = random.Random(1)
    lines = [b"", b"{", b"[]", b"null", b'{"id":1}', b"[" * 5000, b'{"id":1,"op":"open","args":{}}']
    lines += [rng.randbytes(rng.randint(1, 2000)).replace(b"\n", b"") for _ in range(50)]
    for args in (
        {"holder": 3},
        {"holder": "a", "stack": {"blocks": -1, "layers": [], "kind": "disk"}},
    ):
        lines.append(json.dumps({"id": 1, "op": "open", "args": args}).encode())
    huge = {"blocks": 2**32 - 1, "layers": [["00" * 32, 2**32 - 1]] * 5000, "kind": "disk"}
    lines.append(
        json.dumps({"id": 1, "op": "open", "args": {"holder": "a", "stack": huge}}).encode()
    )
    for timeout in (1e400, -1, "x", float("nan")):
        args = {"version": 0, "timeout": timeout}
        lines.append(json.dumps({"id": 1, "op": "faults", "args": args}).encode())
    async with block_server(folder, store.url) as server:
        for line in lines:
            reader, writer = await asyncio.open_unix_connection(str(server.options.control))
            writer.write(line + b"\n")
            if line.strip():
                answer = json.loads(await asyncio.wait_for(reader.readline(), 10))
                assert "error" in answer or answer["ok"], line[:99]
            writer.close()
        _, writer = await asyncio.open_unix_connection(str(server.options.control))
        writer.write(b'{"id":1,"op":"st')  # and hangs up
        writer.close()
        assert (await server.client.stats())["stacks"] == 0


async def test_changed_requests_on_one_connection(folder: Path, store: Store):
    rng = random.Random(2)
    layer = store.write(noise(1, 8), 8)
    stack = {"blocks": 8, "layers": [[layer.id, 0]], "kind": "disk"}
    seeds = [
        {"op": "open", "args": {"holder": "a", "stack": stack}},
        {"op": "prefetch", "args": {"stack": "0" * 64, "chunks": [[0, 1], [2, 3]]}},
        {"op": "keep_only", "args": {"holders": ["a", "b"]}},
        {"op": "first_use", "args": {"stack": "0" * 64}},
        {"op": "faults", "args": {"version": 7, "timeout": 0}},
    ]
    async with block_server(folder, store.url) as server:
        reader, writer = await asyncio.open_unix_connection(str(server.options.control))
        for number in range(1500):
            line = bytearray(json.dumps({"id": number, **rng.choice(seeds)}).encode())
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(line))
                line[at : at + rng.randint(0, 3)] = rng.choice(
                    (b"9", b"-", b'"', b"]", b"\xff", b"")
                )
            writer.write(bytes(line) + b"\n")
            json.loads(await asyncio.wait_for(reader.readline(), 10))
        writer.close()
        await server.client.keep_only(set())
        assert (await server.client.stats())["stacks"] == 0


async def test_an_open_stack_follows_its_chunks_to_another_pack(folder: Path, store: Store):
    dead = noise(1, 600)
    live = {block: dead[block] for block in range(64, 128)}
    store.write(dead, 600, 32)
    layer = store.write(live, 600, 32)
    assert layer.pack is None  # all in the other one's pack
    records = await SqlRecords.open_sqlite(folder / "state.db")
    objects = CoreObjects(_core.Objects(store.url))
    await Claims(objects, "home").put("a", [f"layer/{layer.id}"])
    try:
        async with block_server(folder, store.url) as server:
            path, wanted = await server.open([layer], "guest")
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                assert os.pread(file.fileno(), 1, 64 * BLOCK) == wanted[64 * BLOCK :][:1]
                done = await Collection(objects, records.chunks, Drafts(folder / "drafts")).run()
                assert done.compacted and any(key.startswith("pack/") for key in done.deleted)
                found = await asyncio.to_thread(path.read_bytes)
                assert found == wanted
            assert not (await server.client.faults())[1]
            server.end()
            for data in server.cached("data"):
                data.unlink()
            await server.start()
            drop_pages(path)
            assert await asyncio.to_thread(path.read_bytes) == wanted
    finally:
        await records.close()


async def test_nobody_answers_when_it_is_down(folder: Path):
    store = directory_store(folder)
    async with block_server(folder, store.url) as server:
        server.end()
        try:
            await server.client.stats()
        except InfraError as error:
            assert error.code == "block_server_down"
        else:
            raise AssertionError("it answered")
        await server.start()
