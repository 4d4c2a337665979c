"""Drafts: none survives its writer, however that ends."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from agentenv.errors import InfraError, faults
from agentenv.host.files import second_name
from agentenv.host.mount import mounted
from agentenv.store.drafts import Drafts


@pytest.fixture
def drafts(tmp_path):
    return Drafts(tmp_path / "drafts")


async def test_a_draft_outlives_its_writer_under_a_second_name(drafts, tmp_path):
    async with drafts.draft() as draft:
        draft.path.write_bytes(b"whole")
        second_name(draft.path, tmp_path / "ab" / "kept")
    assert (tmp_path / "ab" / "kept").read_bytes() == b"whole"
    assert not list((tmp_path / "drafts").iterdir())


@pytest.mark.parametrize("fail", [RuntimeError, asyncio.CancelledError])
async def test_a_draft_that_is_not_kept_leaves_nothing(drafts, fail):
    made = []
    with pytest.raises(fail):
        async with drafts.draft() as draft:
            made.append(draft.path)
            draft.path.write_bytes(b"half")
            raise fail
    assert not made[0].exists()


async def test_sweeping_leaves_the_drafts_of_the_living(drafts):
    async with drafts.draft() as draft:
        assert await drafts.sweep() == 0
        assert draft.path.exists()


async def test_sweeping_removes_the_drafts_of_the_dead(drafts, tmp_path):
    script = f"""
import asyncio, sys
from pathlib import Path
from agentenv.store.drafts import Drafts
async def main():
    async with Drafts(Path({str(tmp_path / "drafts")!r})).draft():
        print("made", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"made\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert await drafts.sweep() == 1
    assert await drafts.sweep() == 0


async def test_a_full_disk_is_told_and_leaves_nothing():
    async with mounted("tmpfs", "tmpfs", ("size=64k",)) as folder:
        drafts = Drafts(folder / "drafts")
        with pytest.raises(InfraError) as caught:
            async with drafts.draft() as draft:
                with faults("it could not be written"), draft.path.open("wb") as out:
                    out.write(bytes(1 << 20))
        assert (caught.value.code, caught.value.http_status) == ("disk_full", 507)
        assert not list((folder / "drafts").iterdir())
