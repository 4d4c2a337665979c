import asyncio

import pytest

from agentenv.concurrency import KeyedLocks, Tasks, detached, together, undo_on_failure


async def test_detached_work_ends_although_its_caller_was_cancelled():
    tasks, begun, go, done = Tasks(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        await go.wait()
        done.set()

    caller = tasks.start(detached(tasks, work(), "work"), "caller")
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    await asyncio.wait_for(done.wait(), 5)


async def test_a_failed_task_is_logged_and_close_cancels_the_rest(caplog):
    tasks = Tasks()

    async def fail():
        raise ValueError("gone wrong")

    failing = tasks.start(fail(), "failing")
    waiting = tasks.start(asyncio.Event().wait(), "waiting")
    await asyncio.wait([failing])
    await tasks.close()
    assert waiting.cancelled() and "failing" in caplog.text and "gone wrong" in caplog.text


@pytest.mark.parametrize("end", ["raise", "cancel", "return"])
async def test_undo_runs_in_reverse_unless_the_work_succeeds(end):
    ran = []

    async def slow(name):
        await asyncio.sleep(0)
        ran.append(name)

    async def work():
        async with undo_on_failure() as undo:
            undo.push("first", lambda: slow("first"))
            undo.push("broken", lambda: 1 / 0)
            undo.push("last", lambda: ran.append("last"))
            if end == "raise":
                raise KeyError
            if end == "cancel":
                await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    if end == "cancel":
        task.cancel()
    await asyncio.wait([task])
    assert ran == ([] if end == "return" else ["last", "first"])


async def test_keyed_locks_exclude_by_key_and_are_forgotten():
    locks, inside, most = KeyedLocks(), {"a": 0, "b": 0}, {"a": 0, "b": 0}

    async def work(key):
        async with locks.hold(key):
            inside[key] += 1
            most[key] = max(most[key], inside[key])
            await asyncio.sleep(0)
            inside[key] -= 1

    await asyncio.gather(*(work(key) for key in "ab" * 5))
    assert most == {"a": 1, "b": 1} and not locks._locks


async def test_a_failure_that_its_caller_is_told_is_not_logged(caplog):
    tasks = Tasks()

    async def fail():
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        await detached(tasks, fail(), "work")
    assert not caplog.records


async def test_a_failure_whose_caller_left_is_logged_on_one_line(caplog):
    tasks, go = Tasks(), asyncio.Event()

    async def fail():
        await go.wait()
        raise ValueError("untold")

    caller = tasks.start(detached(tasks, fail(), "a\nforged line"), "caller")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()


async def test_together_gives_all_or_the_first_failure_with_none_left_running():
    async def give(value):
        return value

    assert await together(give(1), give("a")) == [1, "a"]
    ended = []

    async def slow():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await together(slow(), fail())
    assert ended == [True]
