"""A deadline comes once, where it was set last."""

import asyncio
from datetime import UTC, datetime, timedelta

from agentenv.concurrency import Tasks
from agentenv.sandbox.deadline import Deadline

LATER = timedelta(hours=1)


async def test_it_comes_where_it_was_set_last_and_not_when_cancelled():
    tasks, passed = Tasks(), asyncio.Event()

    async def note():
        passed.set()

    deadline = Deadline(tasks, "test", note)
    now = datetime.now(UTC)
    deadline.set(now)
    deadline.cancel()
    deadline.set(now)
    deadline.set(now + LATER)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not passed.is_set()
    deadline.set(now - LATER)
    async with asyncio.timeout(10):
        await passed.wait()
    deadline.cancel()  # already so is success
    await tasks.close()
