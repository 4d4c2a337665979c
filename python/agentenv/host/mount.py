"""Mounts: by mount(2), and by mount(8) where a file needs a loop device."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from agentenv.host.process import ProcessFailed, run

DEADLINE = 60.0  # seconds for mount and umount
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MNT_DETACH = 2

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


def attach(source: Path | str, point: Path, kind: str, options: str = "") -> None:
    """Mount on an existing folder, to be read only; devices and setuid programs are nothing there.

    Blocking; raises OSError.
    """
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    words = (os.fsencode(source), os.fsencode(point), kind.encode(), flags, options.encode())
    if _libc.mount(*words):
        raise _last_error(f"mount {kind} on {point}")


async def attach_file(file: Path, point: Path, kind: str) -> None:
    """As ``attach``, for a file that is a file system. Raises OSError, ProcessFailed."""
    try:
        await asyncio.to_thread(attach, file, point, kind)
    except OSError as error:
        # Kernels before 6.12, and all of them for a file of FUSE's, mount devices only.
        if error.errno != errno.ENOTBLK:
            raise
        await _attach_by_loop(file, point, kind)


async def _attach_by_loop(file: Path, point: Path, kind: str) -> None:
    words = ("mount", "-t", kind, "-o", "loop,ro,nosuid,nodev", str(file), str(point))
    await run(words, timeout=DEADLINE)
    # Reads of the file then go on side by side, and its pages are cached once, not twice.
    try:
        await run(("losetup", "--direct-io=on", str(device_of(point))), timeout=DEADLINE)
    except ProcessFailed as error:
        log.warning("%s is cached twice: %s", file, error.why)


def device_of(point: Path) -> Path:
    """The block device that is mounted there."""
    number = point.stat().st_dev
    known = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return Path("/dev") / known.resolve().name


def detach(point: Path) -> None:
    """Take away all that is mounted there; what is in use goes with its last user. Blocking: reads
    under way are waited for. Raises OSError."""
    while os.path.ismount(point):
        if _libc.umount2(os.fsencode(point), MNT_DETACH):
            raise _last_error(f"unmount {point}")


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


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
