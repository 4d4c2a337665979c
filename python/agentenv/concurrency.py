"""Tasks that are named and held, undo stacks that also run when cancelled, serial queues."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class Tasks:
    """Owner of background tasks: each has a name, none is lost to the collector.

    A task that fails is logged when it ends; ``close`` cancels what remains and waits for it.
    """

    def __init__(self) -> None:
        self._held: set[asyncio.Task[Any]] = set()
        self._awaited: set[asyncio.Task[Any]] = set()

    def start(
        self, coro: Coroutine[Any, Any, T], name: str, *, awaited: bool = False
    ) -> asyncio.Task[T]:
        """``awaited``: somebody waits for it and is told its failure, until ``abandon``."""
        task = asyncio.create_task(coro, name=name)
        self._held.add(task)
        if awaited:
            self._awaited.add(task)
        task.add_done_callback(self._ended)
        return task

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Nobody waits for it any more: its failure is logged after all."""
        self._awaited.discard(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._held.discard(task)
        told = task in self._awaited
        self._awaited.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not told:
            log.error("task %r failed", task.get_name(), exc_info=error)

    async def close(self) -> None:
        held = list(self._held)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def detached(tasks: Tasks, coro: Coroutine[Any, Any, T], name: str) -> T:
    """Run ``coro`` to its end even when the caller is cancelled meanwhile."""
    task = tasks.start(coro, name, awaited=True)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        tasks.abandon(task)
        raise


class Undo:
    """What must be undone if the work that is under way does not succeed.

    Steps run in reverse order, each to its end, also on cancellation; a step
    that fails is logged and does not stop the others.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Awaitable[object] | object]]] = []

    def push(self, what: str, step: Callable[[], Awaitable[object] | object]) -> None:
        self._steps.append((what, step))

    def forget(self) -> None:
        """The work succeeded: nothing is to be undone any more."""
        self._steps.clear()

    async def run(self) -> None:
        while self._steps:
            what, step = self._steps.pop()
            try:
                result = step()
                if isinstance(result, Awaitable):
                    await result
            except Exception:
                log.exception("undo step failed: %s", what)


@asynccontextmanager
async def undo_on_failure() -> AsyncGenerator[Undo]:
    """Yield an ``Undo`` that runs if the block raises or is cancelled."""
    undo = Undo()
    try:
        yield undo
    except BaseException:
        await asyncio.shield(undo.run())
        raise


class KeyedLocks:
    """One lock per key, forgotten when nobody holds or awaits it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncGenerator[None]:
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, users - 1)


async def interruptible(work: Callable[[threading.Event], T]) -> T:
    """Run blocking ``work`` in a thread; on cancellation set its event and wait for it to end."""
    stop = threading.Event()
    thread = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([thread])
        raise


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """What each gives, in order. If one fails the others are cancelled and have ended when its
    error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
