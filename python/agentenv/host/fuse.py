"""A FUSE mount, apart from who serves it: whoever keeps the descriptor keeps the mount alive.

Nothing here asks the server: a mount without one can be looked at and taken away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from agentenv.errors import InfraError

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOATIME = 1, 2, 4, 1024
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8
READ_AHEAD_KIB = 1024  # the kernel's 128 halves what sequential reads reach
SOURCE = "agentenv"
_libc = ctypes.CDLL(None, use_errno=True)


def mount(path: Path) -> int:
    """Mount on an existing folder; returns the descriptor that a server is to answer at.

    The mount lives until every copy of the descriptor is closed (then each access fails with
    ENOTCONN) or `unmount`. Raises InfraError.
    """
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _failed("open /dev/fuse", error, fix="modprobe fuse; run as root") from error
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    flags = ctypes.c_ulong(MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOATIME)
    if _libc.mount(SOURCE.encode(), os.fsencode(path), b"fuse", flags, options.encode()) != 0:
        error = _last_error()
        os.close(fd)
        fix = "run as root, with CAP_SYS_ADMIN" if error.errno == errno.EPERM else ""
        raise _failed(f"mount {path}", error, fix=fix) from error
    return fd


def raise_read_ahead(path: Path) -> None:
    """Let the kernel read ahead in the largest requests; once the server has answered INIT.

    Raises InfraError.
    """
    device = next((device for device, point in _mounts() if point == path), None)
    if device is None:
        raise InfraError(f"{path} is not mounted", fix="mount it first")
    try:
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(READ_AHEAD_KIB))
    except OSError as error:
        raise _failed("set the read-ahead", error, fix="mount sysfs writable at /sys") from error


def is_mounted(path: Path) -> bool:
    """Whether a FUSE file system of ours is mounted there; it may be without a server."""
    return any(point == path for _, point in _mounts())


def unmount(path: Path, *, force: bool = False) -> None:
    """Take the mount away; one that is in use goes with its last user. Not mounted is success.

    ``force``: requests in flight fail now, and the mount is dead to those who still use it.
    Raises InfraError.
    """
    while is_mounted(path):
        attempts = (MNT_FORCE | MNT_DETACH,) if force else (0, MNT_DETACH)
        if not any(_umount(path, flags) for flags in attempts):
            raise _failed(f"unmount {path}", _last_error(), fix="run as root") from None


def _umount(path: Path, flags: int) -> bool:
    return _libc.umount2(os.fsencode(path), flags | UMOUNT_NOFOLLOW) == 0


def _mounts() -> Iterator[tuple[str, Path]]:
    """Our FUSE mounts: (major:minor, mount point)."""
    for line in Path("/proc/self/mountinfo").read_text("latin-1").split("\n"):
        head, _, tail = line.partition(" - ")
        fields = head.split(" ")
        if tail.split(" ")[:2] == ["fuse", SOURCE]:
            # The kernel writes space, tab, newline and backslash as octal escapes.
            point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
            yield fields[2], Path(os.fsdecode(point.encode("latin-1")))


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _failed(what: str, error: OSError, *, fix: str) -> InfraError:
    return InfraError(f"could not {what}", why=str(error), fix=fix, code="fuse_failed")
