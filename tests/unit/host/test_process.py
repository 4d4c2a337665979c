import asyncio
import os
from pathlib import Path

import pytest

from agentenv.errors import MissingTool
from agentenv.host.process import ProcessFailed, run, start_time


async def test_output_input_and_status_come_back():
    done = await run(("sh", "-c", "cat; echo e >&2; exit 3"), stdin=b"in", check=False)
    assert (done.status, done.stdout, done.stderr) == (3, b"in", b"e\n")


async def test_a_failure_carries_the_tools_own_words():
    with pytest.raises(ProcessFailed) as caught:
        await run(("sh", "-c", "echo first >&2; echo what went wrong >&2; exit 4"))
    assert caught.value.done.status == 4 and "what went wrong" in caught.value.message


async def test_a_tool_that_is_not_there_is_named_with_its_remedy():
    with pytest.raises(MissingTool) as caught:
        await run(("no-such-tool-anywhere",))
    assert "no-such-tool-anywhere" in caught.value.message and "make setup" in caught.value.message


@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_the_whole_session_ends_with_the_wait(tmp_path, how):
    pids = tmp_path / "pids"
    script = f"sleep 60 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait"
    work = asyncio.ensure_future(run(("sh", "-c", script), timeout=1.0 if how == "timeout" else 60))
    while not pids.exists():
        await asyncio.sleep(0.01)
    if how == "cancel":
        work.cancel()
    with pytest.raises((TimeoutError, asyncio.CancelledError)):
        await work
    for pid in pids.read_text().split():
        while start_time(int(pid)) is not None:  # the kernel takes a moment to end it
            await asyncio.sleep(0.01)


def test_a_start_time_tells_processes_apart():
    assert start_time(os.getpid()) == start_time(os.getpid())
    assert start_time(1) != start_time(os.getpid())
    free = int(Path("/proc/sys/kernel/pid_max").read_text()) - 1
    assert start_time(free) is None
