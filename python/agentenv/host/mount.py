"""Mounts, each with an owner that takes it away."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from agentenv.host.process import ProcessFailed, run

DEADLINE = 60.0  # seconds for mount and umount


@asynccontextmanager
async def mounted(
    source: Path, kind: str, options: tuple[str, ...] = ("ro",)
) -> AsyncGenerator[Path]:
    """Mount a file (through a loop device) or source on a fresh folder; yields the folder.

    Raises ProcessFailed with the kernel's message.
    """
    folder = Path(tempfile.mkdtemp(prefix="agentenv-mount-"))
    try:
        words = ("mount", "-t", kind, "-o", ",".join(options), str(source), str(folder))
        await run(words, timeout=DEADLINE)
        try:
            yield folder
        finally:
            await _unmount(folder)
    finally:
        folder.rmdir()


async def _unmount(folder: Path) -> None:
    try:
        await run(("umount", str(folder)), timeout=DEADLINE)
    except ProcessFailed:  # somebody looks into it; it goes with the last look
        await run(("umount", "--lazy", str(folder)), timeout=DEADLINE)
