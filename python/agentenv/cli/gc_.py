"""`aenv gc`: short for `aenv store gc`."""

from __future__ import annotations

from agentenv.cli.store_ import gc as command

__all__ = ["command"]
