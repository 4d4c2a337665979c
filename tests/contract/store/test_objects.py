"""The contract of object stores, run on each kind there is: a directory and a real S3 server."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.s3 import S3Server
from tests.waiting import until

from agentenv.errors import InfraError, NotFound, UserError
from agentenv.host.mount import mounted
from agentenv.store.objects import CoreObjects, open_objects

BIG = 40 << 20


@dataclass
class Store:
    objects: CoreObjects
    root: Path
    s3: S3Server | None

    def half_made(self) -> list[Path]:
        """What writers have begun and not ended."""
        if self.s3:
            folder = self.s3.files / ".sgwtmp/multipart"
            return [path for path in folder.rglob("*") if path.is_file()]
        return list((self.root / "drafts").glob("*"))


@pytest.fixture(params=["directory", "s3"])
def store(request, tmp_path):
    if request.param == "directory":
        root = tmp_path / "store"
        return Store(asyncio.run(open_objects(str(root))), root, None)
    server = request.getfixturevalue("s3_keys")
    prefix = f"tests/{secrets.token_hex(4)}"
    return Store(asyncio.run(open_objects(server.url(prefix))), server.files / prefix, server)


async def keys(store, prefix=""):
    return [entry.key for entry in await store.objects.list(prefix)]


async def test_what_was_put_is_there(store):
    assert await store.objects.get("pack/abcd", 100) is None
    assert await store.objects.head("pack/abcd") is None
    await store.objects.put("pack/abcd", b"data")
    assert await store.objects.get("pack/abcd", 4) == b"data"
    entry = await store.objects.head("pack/abcd")
    assert (entry.key, entry.size) == ("pack/abcd", 4)
    assert abs(entry.modified - (await store.objects.list("pack/"))[0].modified) < 1
    await store.objects.put("pack/abcd", b"other")
    await store.objects.put("empty", b"")
    assert await store.objects.get("pack/abcd", 100) == b"other"
    assert await store.objects.get("empty", 0) == b""


async def test_more_than_was_expected_is_not_read(store):
    await store.objects.put("a", b"12345")
    with pytest.raises(InfraError) as caught:
        await store.objects.get("a", 4)
    assert caught.value.code == "store_damaged" and "5 bytes" in caught.value.message


async def test_a_range_is_exact(store):
    data = os.urandom(1000)
    await store.objects.put("pack/abcd", data)
    for start, end in [(0, 1), (0, 1000), (999, 1000), (100, 900), (5, 5)]:
        assert await store.objects.get_range("pack/abcd", start, end) == data[start:end]
    for start, end in [(0, 1001), (999, 1001), (1000, 1001), (5000, 6000)]:
        with pytest.raises(InfraError) as caught:
            await store.objects.get_range("pack/abcd", start, end)
        assert caught.value.code == "store_damaged"
    with pytest.raises(UserError):
        await store.objects.get_range("pack/abcd", 2, 1)
    with pytest.raises(NotFound):
        await store.objects.get_range("pack/none", 0, 1)


@pytest.mark.parametrize("size", [0, 1000, 16 << 20, BIG])
async def test_files_go_in_and_out_whole(store, tmp_path, size):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(size))
    await store.objects.put_file("pack/abcd", source)
    assert (await store.objects.head("pack/abcd")).size == size
    target.write_bytes(b"what was there")
    assert await store.objects.get_to("pack/abcd", target) == size
    assert target.read_bytes() == source.read_bytes()
    assert not store.half_made()


async def test_much_data_from_memory(store):
    data = os.urandom(BIG + 1)
    await store.objects.put("pack/abcd", data)
    assert await store.objects.get("pack/abcd", BIG + 1) == data
    assert not store.half_made()


async def test_getting_to_a_file_what_is_not_there_leaves_nothing(store, tmp_path):
    with pytest.raises(NotFound):
        await store.objects.get_to("pack/none", tmp_path / "out" / "target")
    (tmp_path / "out").mkdir()
    with pytest.raises(NotFound):
        await store.objects.get_to("pack/none", tmp_path / "out" / "target")
    assert not list((tmp_path / "out").iterdir())


async def test_a_file_that_is_not_there_cannot_be_put(store):
    with pytest.raises(InfraError, match="/nonexistent") as caught:
        await store.objects.put_file("a", Path("/nonexistent"))
    assert caught.value.code == "store_failed"


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "A", "a b", "é"])
async def test_what_is_no_key_is_refused(store, key, tmp_path):
    for call in (
        store.objects.get(key, 1),
        store.objects.put(key, b""),
        store.objects.put_new(key, b""),
        store.objects.put_file(key, tmp_path / "x"),
        store.objects.get_to(key, tmp_path / "x"),
        store.objects.head(key),
        store.objects.delete(["good", key]),
    ):
        with pytest.raises(UserError) as caught:
            await call
        assert caught.value.code == "invalid_store"


async def test_of_many_that_put_a_new_one_wins(store):
    values = [f"writer {number}".encode() * 100 for number in range(20)]
    won = await asyncio.gather(*(store.objects.put_new("lock/one", value) for value in values))
    assert won.count(True) == 1
    assert await store.objects.get("lock/one", 10000) == values[won.index(True)]
    assert not await store.objects.put_new("lock/one", b"late")


async def test_an_object_put_by_many_at_once_is_whole(store):
    values = {bytes([number]) * (1 << 20) for number in range(12)}
    await store.objects.put("p/one", min(values))

    async def read():
        for _ in range(10):
            assert await store.objects.get("p/one", 1 << 20) in values

    await asyncio.gather(read(), read(), *(store.objects.put("p/one", value) for value in values))
    assert await store.objects.get("p/one", 1 << 20) in values
    assert await keys(store) == ["p/one"]


async def test_many_are_listed_and_deleted(store):
    wanted = [f"many/{number:04x}" for number in range(1100)] + ["other/a", "top"]
    gate = asyncio.Semaphore(8)

    async def put(key):
        async with gate:
            await store.objects.put(key, b"")

    await asyncio.gather(*map(put, wanted))
    assert await keys(store) == sorted(wanted)
    assert await keys(store, "many/") == wanted[:1100]
    assert await keys(store, "none/") == []
    with pytest.raises(UserError):
        await store.objects.list("man")
    await store.objects.delete([*wanted[:-1], "many/absent"])
    assert await keys(store) == ["top"]
    await store.objects.delete(["top"])
    await store.objects.delete(["top"])
    assert await keys(store) == []


async def test_a_cancelled_writer_leaves_a_whole_object_or_none(store, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(BIG))
    writer = asyncio.ensure_future(store.objects.put_file("pack/abcd", source))
    await asyncio.sleep(0.02)
    writer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writer
    for _ in range(500):
        if entry := await store.objects.head("pack/abcd"):
            assert entry.size == BIG
            break
        await asyncio.sleep(0.02)
    until(lambda: not store.half_made())


@pytest.mark.parametrize(
    "url",
    [
        "relative",
        "ftp://host/x",
        "s3://",
        "s3://KEY:sesame@bucket",
        "s3://bucket?secret=sesame",
        "s3://bucket?style=virtual&endpoint=http://127.0.0.1:1",
    ],
)
async def test_urls_that_are_refused(url):
    with pytest.raises(UserError) as caught:
        await open_objects(url)
    assert caught.value.code == "invalid_store" and "sesame" not in caught.value.message


async def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    big = tmp_path / "big"
    big.write_bytes(os.urandom(2 << 20))
    async with mounted("tmpfs", "tmpfs", ("size=1m",)) as folder:
        objects = await open_objects(str(folder / "store"))
        await objects.put("p/kept", b"kept")
        for call in (
            objects.put("p/big", big.read_bytes()),
            objects.put("p/kept", big.read_bytes()),
            objects.put_new("p/big", big.read_bytes()),
            objects.put_file("p/big", big),
        ):
            with pytest.raises(InfraError) as caught:
                await call
            assert (caught.value.code, caught.value.http_status) == ("disk_full", 507)
        assert not list((folder / "store/drafts").iterdir())
        assert [entry.key for entry in await objects.list("")] == ["p/kept"]
        assert await objects.get("p/kept", 4) == b"kept"


async def test_a_full_disk_of_the_reader(store, tmp_path):
    await store.objects.put("p/big", os.urandom(2 << 20))
    async with mounted("tmpfs", "tmpfs", ("size=1m",)) as folder:
        with pytest.raises(InfraError) as caught:
            await store.objects.get_to("p/big", folder / "target")
        assert caught.value.code == "disk_full"
        assert not list(folder.iterdir())


async def test_a_killed_writer_leaves_a_draft_that_is_swept(tmp_path):
    objects, pipe = await open_objects(str(tmp_path / "store")), tmp_path / "pipe"
    os.mkfifo(pipe)
    script = "import sys; from agentenv._core import Objects; Objects(sys.argv[1]).put_file('a', sys.argv[2])"
    child = subprocess.Popen([sys.executable, "-c", script, tmp_path / "store", pipe])
    with pipe.open("wb", buffering=0) as feed:
        feed.write(b"half")
        drafts = tmp_path / "store/drafts"
        until(lambda: [path for path in drafts.glob("*") if path.stat().st_size])
        assert await objects.sweep_drafts() == 0
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert await objects.list("") == []
    assert await objects.sweep_drafts() == 1
    assert not list(drafts.iterdir())
