"""The contract of blob stores, run on each implementation there is."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from agentenv.errors import InfraError
from agentenv.host.mount import mounted
from agentenv.store.directory import DirectoryBlobs

KEY, OTHER = "data/" + "ab" * 32, "tree/" + "cd" * 32


@pytest.fixture(params=[DirectoryBlobs])
def blobs(request, tmp_path):
    return request.param(tmp_path / "blobs")


async def put(blobs, key, data):
    async with blobs.draft() as draft:
        draft.path.write_bytes(data)
        return await draft.commit(key)


async def test_a_committed_blob_is_there_and_read_only(blobs):
    assert await blobs.path(KEY) is None
    path = await put(blobs, KEY, b"data")
    assert await blobs.path(KEY) == path and path.read_bytes() == b"data"
    assert path.stat().st_mode & 0o777 == 0o444
    assert await blobs.keys() == {KEY}


async def test_the_first_blob_of_a_key_stays(blobs):
    await put(blobs, KEY, b"first")
    await put(blobs, KEY, b"second")
    assert (await blobs.path(KEY)).read_bytes() == b"first"


async def test_deleting_is_final_and_may_be_repeated(blobs):
    await put(blobs, KEY, b"x")
    await put(blobs, OTHER, b"y")
    await blobs.delete(KEY)
    await blobs.delete(KEY)
    assert await blobs.keys() == {OTHER}


@pytest.mark.parametrize("fail", [RuntimeError, asyncio.CancelledError])
async def test_a_draft_that_is_not_committed_leaves_nothing(blobs, fail):
    made = []
    with pytest.raises(fail):
        async with blobs.draft() as draft:
            made.append(draft.path)
            draft.path.write_bytes(b"half")
            raise fail
    assert not made[0].exists() and not await blobs.keys()


async def test_sweeping_leaves_the_drafts_of_the_living(blobs):
    async with blobs.draft() as draft:
        assert await blobs.sweep() == 0
        assert draft.path.exists()


async def test_sweeping_removes_the_drafts_of_the_dead(blobs, tmp_path):
    script = f"""
import asyncio, sys
from pathlib import Path
from agentenv.store.directory import DirectoryBlobs
async def main():
    async with DirectoryBlobs(Path({str(tmp_path / "blobs")!r})).draft():
        print("made", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"made\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert await blobs.sweep() == 1
    assert await blobs.sweep() == 0


@pytest.mark.parametrize("key", ["", "data", "data/../x", "data/XY" * 8, "/etc/passwd", "a/b/c"])
async def test_what_is_no_key_is_refused(blobs, key):
    with pytest.raises(ValueError, match="no blob key"):
        await blobs.path(key)


async def test_a_full_disk_is_told_and_leaves_nothing():
    async with mounted("tmpfs", "tmpfs", ("size=64k",)) as folder:
        blobs = DirectoryBlobs(folder / "blobs")
        with pytest.raises(InfraError) as caught:
            async with blobs.draft() as draft:
                from agentenv.errors import faults

                with faults("it could not be written"), draft.path.open("wb") as out:
                    out.write(bytes(1 << 20))
        assert (caught.value.code, caught.value.http_status) == ("disk_full", 507)
        assert not list((folder / "blobs" / "drafts").iterdir())
