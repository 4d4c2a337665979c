"""A moment at which something is done, which may be moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from agentenv.concurrency import Tasks


class Deadline:
    """``passed`` is run as a task called ``name`` when it comes."""

    def __init__(
        self, tasks: Tasks, name: str, passed: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._tasks, self._name, self._passed = tasks, name, passed
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: datetime) -> None:
        """It is at ``at``, and at no other time."""
        self.cancel()
        delay = (at - datetime.now(UTC)).total_seconds()
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, delay), lambda: self._tasks.start(self._passed(), self._name)
        )

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
