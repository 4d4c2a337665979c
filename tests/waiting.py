"""Waiting for a condition, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 30.0) -> T:
    """The first true value of ``condition``; fails when none came in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
    return found
