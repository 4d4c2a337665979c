"""How many machines wait, which are handed out, and that none is left."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InfraError
from agentenv.node import warm
from agentenv.node.warm import IDLE, WINDOW, WarmPool, wanted
from agentenv.sandbox.ground import Seat, Shape

SMALL, LARGE = Shape("qemu", 1, 512), Shape("qemu", 2, 4096)
NOW = 10_000.0


@pytest.mark.parametrize(
    ("ages", "most", "number"),
    [
        ((), 4, 0),
        ((0.0,), 4, 1),
        ((0.0, 1.0, 2.0), 4, 3),
        ((0.0, 1.0, 2.0), 2, 2),
        ((WINDOW + 1, WINDOW + 2), 4, 1),
        ((IDLE + 1,), 4, 0),
        ((0.0,), 0, 0),
    ],
)
def test_as_many_wait_as_were_asked_for_lately(ages, most, number):
    assert wanted([NOW - age for age in ages], NOW, most) == number


@given(st.lists(st.floats(0, NOW)), st.integers(0, 8))
def test_never_more_than_allowed(demands, most):
    assert 0 <= wanted(demands, NOW, most) <= most


class World:
    """Counts what is started and dropped."""

    def __init__(self):
        self.alive, self.number, self.fails = {}, 0, set()

    async def start(self, shape):
        if shape in self.fails:
            raise InfraError("no slot is free", code="no_slots")
        self.number += 1
        machine = SimpleNamespace(ended=False, shape=shape)
        seat = Seat(SimpleNamespace(index=self.number), f"m{self.number}", machine)
        self.alive[seat.machine] = seat
        return seat

    async def drop(self, seat):
        if seat.machine in self.fails:
            raise InfraError("the supervisor does not answer")
        del self.alive[seat.machine]


async def settle(pool, number):
    async with asyncio.timeout(5):
        while pool.ready != number:
            await asyncio.sleep(0)


async def test_the_first_finds_none_and_the_next_one_that_waits():
    world = World()
    pool = WarmPool(world.start, world.drop, 4)
    assert pool.take(SMALL) is None
    await settle(pool, 1)
    seat = pool.take(SMALL)
    assert seat and seat.waiting.shape == SMALL
    assert pool.take(LARGE) is None  # of another size
    await settle(pool, 3)
    assert (pool.taken, pool.missed) == (1, 2)
    await pool.close()
    assert list(world.alive) == [seat.machine]  # it is a sandbox's now


async def test_one_that_died_is_not_handed_out():
    world = World()
    pool = WarmPool(world.start, world.drop, 4)
    pool.take(SMALL)
    await settle(pool, 1)
    (dead,) = world.alive.values()
    dead.waiting.ended = True
    assert pool.take(SMALL) is None
    await settle(pool, 2)
    assert dead.machine not in world.alive
    await pool.close()
    assert not world.alive


async def test_one_that_cannot_be_taken_away_now_is_taken_later(monkeypatch):
    world = World()
    pool = WarmPool(world.start, world.drop, 4)
    pool.take(SMALL)
    await settle(pool, 1)
    (name,) = world.alive
    world.fails.add(name)
    monkeypatch.setattr(warm, "wanted", lambda *_: 0)
    pool.refill()
    await asyncio.sleep(0.01)
    assert pool.ready == 1 and name in world.alive
    world.fails.clear()
    pool.refill()
    await settle(pool, 0)
    assert not world.alive
    await pool.close()


async def test_one_that_is_just_taken_away_is_not_handed_out(monkeypatch):
    world, going, gone = World(), asyncio.Event(), asyncio.Event()

    async def drop(seat):
        going.set()
        await gone.wait()
        await world.drop(seat)

    pool = WarmPool(world.start, drop, 4)
    pool.take(SMALL)
    await settle(pool, 1)
    monkeypatch.setattr(warm, "wanted", lambda *_: 0)
    pool.refill()
    await going.wait()
    assert pool.take(SMALL) is None
    gone.set()
    await settle(pool, 0)
    await pool.close()


async def test_a_node_that_has_no_room_goes_on_without():
    world = World()
    world.fails.add(SMALL)
    pool = WarmPool(world.start, world.drop, 4)
    assert pool.take(SMALL) is None
    assert pool.take(LARGE) is None  # another shape is made all the same
    await settle(pool, 1)
    world.fails.clear()
    assert pool.take(SMALL) is None  # asks again
    await settle(pool, 2)
    await pool.close()
    assert not world.alive


async def test_none_waits_where_none_is_wanted():
    world = World()
    pool = WarmPool(world.start, world.drop, 0)
    assert pool.take(SMALL) is None
    await asyncio.sleep(0)
    assert not world.alive and pool.missed == 0
