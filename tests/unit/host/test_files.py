import asyncio

import pytest

from agentenv.host.files import file_lock, try_file_lock


async def test_one_holder_at_a_time(tmp_path):
    order = []

    async def hold(name, entered=None, go=None):
        async with file_lock(tmp_path / "lock", "k"):
            order.append(name)
            if entered:
                entered.set()
                await go.wait()
                order.append(f"{name} ends")

    entered, go = asyncio.Event(), asyncio.Event()
    first = asyncio.ensure_future(hold("a", entered, go))
    await entered.wait()
    second = asyncio.ensure_future(hold("b"))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, second)
    assert order == ["a", "a ends", "b"]


async def test_other_keys_and_sharers_do_not_wait(tmp_path):
    path = tmp_path / "lock"
    async with file_lock(path, "k", shared=True), file_lock(path, "k", shared=True):  # noqa: SIM117
        async with file_lock(path, "other"), file_lock(path), try_file_lock(path, "k") as had:
            assert not had
    async with try_file_lock(path, "k") as had:
        assert had


async def test_a_cancelled_wait_holds_nothing(tmp_path):
    path = tmp_path / "lock"
    async with file_lock(path):
        waiting = asyncio.ensure_future(file_lock(path).__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with try_file_lock(path) as had:
        assert had
