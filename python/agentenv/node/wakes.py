"""Wakes the sandboxes that the data plane holds requests for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agentenv.concurrency import Tasks
from agentenv.errors import AgentEnvError, InfraError
from agentenv.node.edge import EdgeClient

log = logging.getLogger(__name__)

LONG_POLL = 30.0  # seconds
ASK_AGAIN = 0.5  # seconds after a question that failed

Wake = Callable[[str], Awaitable[object]]


class Wakes:
    """``poll`` is asked for news only and waits for them; ``client`` is told of failures.

    One sandbox is woken by one task at a time. What is asked for again meanwhile (requests that
    came after those of the first time were answered) is done once more after it.
    """

    def __init__(self, poll: EdgeClient, client: EdgeClient) -> None:
        self._poll, self._client = poll, client
        self._tasks = Tasks()
        self._again: dict[str, bool] = {}  # of each that is in hand

    def watch(self, wake: Wake) -> None:
        self._tasks.start(self._follow(wake), "watch wakes")

    async def _follow(self, wake: Wake) -> None:
        version, down = -1, False
        while True:
            try:
                version, held = await self._poll.wakes(version, LONG_POLL)
            except InfraError as error:
                if not down:
                    log.warning("nobody is woken by traffic now: %s", error.message)
                down = True
                await asyncio.sleep(ASK_AGAIN)
                continue
            down = False
            for sandbox_id in held:
                self._take(sandbox_id, wake)

    def _take(self, sandbox_id: str, wake: Wake) -> None:
        if sandbox_id in self._again:
            self._again[sandbox_id] = True
            return
        self._again[sandbox_id] = True
        self._tasks.start(self._wake(sandbox_id, wake), f"wake {sandbox_id}")

    async def _wake(self, sandbox_id: str, wake: Wake) -> None:
        try:
            while self._again[sandbox_id]:
                self._again[sandbox_id] = False
                await self._wake_once(sandbox_id, wake)
        finally:
            del self._again[sandbox_id]

    async def _wake_once(self, sandbox_id: str, wake: Wake) -> None:
        try:
            await wake(sandbox_id)
        except AgentEnvError as error:
            log.warning("%s was not woken: %s", sandbox_id, error.message)
            await self._failed(sandbox_id, error.message)
        except Exception:
            await self._failed(sandbox_id, "an internal error")
            raise

    async def _failed(self, sandbox_id: str, message: str) -> None:
        self._again[sandbox_id] = False  # all that are held by now are answered
        try:
            await self._client.wake_failed(sandbox_id, message)
        except InfraError as error:  # then its clients are cut off, too
            log.warning("the data plane was not told: %s", error.message)

    async def stop(self) -> None:
        await self._tasks.close()

    async def close(self) -> None:
        await self.stop()
        await self._poll.close()
