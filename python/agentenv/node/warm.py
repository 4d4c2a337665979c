"""Machines that wait to be restored, in slots of their own: as many as were asked for lately.

A waiting machine has nothing of a sandbox: no memory, no name; in gVisor an empty disk over the
image. QEMU's costs 34 MB and saves the start of a process, some 40 ms (measured).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from agentenv.concurrency import Tasks
from agentenv.errors import AgentEnvError
from agentenv.sandbox.ground import Seat, Shape

log = logging.getLogger(__name__)

WINDOW = 60.0  # seconds in which a demand counts
IDLE = 600.0  # seconds after the last demand that one is kept ready


def wanted(demands: Iterable[float], now: float, most: int) -> int:
    """How many to keep ready: what was asked for at ``demands`` (seconds) in the last minute, one
    for ten minutes."""
    ages = [now - at for at in demands]
    lately = sum(age < WINDOW for age in ages)
    return min(most, max(lately, int(any(age < IDLE for age in ages))))


class WarmPool:
    """``start`` makes one that waits, ``drop`` takes one away; at most ``most`` in all."""

    def __init__(
        self,
        start: Callable[[Shape], Awaitable[Seat]],
        drop: Callable[[Seat], Coroutine[Any, Any, None]],
        most: int,
    ) -> None:
        self._start, self._drop, self._most = start, drop, most
        self._ready: dict[Shape, list[Seat]] = defaultdict(list)
        self._demands: dict[Shape, deque[float]] = defaultdict(lambda: deque(maxlen=max(most, 1)))
        self._tasks = Tasks()
        self._making = False
        self.taken = self.missed = 0

    @property
    def ready(self) -> int:
        return sum(map(len, self._ready.values()))

    def take(self, shape: Shape) -> Seat | None:
        """One that waits, if there is one whose process runs."""
        if not self._most:
            return None
        self._demands[shape].append(time.monotonic())
        found = None
        while found is None and self._ready[shape]:
            seat = self._ready[shape].pop()
            if seat.waiting and not seat.waiting.ended:
                found = seat
            else:
                self._tasks.start(self._drop(seat), f"drop {seat.machine}")
        self.taken, self.missed = self.taken + bool(found), self.missed + (not found)
        self.refill()
        return found

    def refill(self) -> None:
        """Bring what waits to what is wanted, one at a time."""
        if not self._making:
            self._making = True
            self._tasks.start(self._refill(), "machines that wait")

    async def _refill(self) -> None:
        try:
            while await self._step():
                pass
        finally:
            self._making = False

    async def _step(self) -> bool:
        """One more or one less; False if all is as it should be."""
        now = time.monotonic()
        for shape, seats in list(self._ready.items()):
            if len(seats) > wanted(self._demands[shape], now, self._most):
                return await self._dropped(seats)
        for shape, demands in list(self._demands.items()):
            enough = len(self._ready[shape]) >= wanted(demands, now, self._most)
            if not enough and self.ready < self._most:
                await self._add(shape)
                return True
        return False

    async def _add(self, shape: Shape) -> None:
        """One more; of a shape that cannot be made (its image is gone, no slot is free) none is
        wanted until it is asked for again."""
        try:
            self._ready[shape].append(await self._start(shape))
        except AgentEnvError as error:
            log.warning("no machine of %s is kept ready now: %s", shape, error.message)
            self._demands[shape].clear()

    async def _dropped(self, seats: list[Seat]) -> bool:
        """One less; False if it could not be taken away and is still there."""
        seat = seats.pop()  # nobody is given it meanwhile
        try:
            await self._drop(seat)
        except AgentEnvError as error:
            log.warning("machine %s, which waits, stays for now: %s", seat.machine, error.message)
            seats.insert(0, seat)
            return False
        return True

    async def close(self) -> None:
        """Take all that wait away."""
        await self._tasks.close()
        self._most = 0
        for seats in self._ready.values():
            while seats and await self._dropped(seats):
                pass
