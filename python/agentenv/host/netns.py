"""Network namespaces by direct system calls: made, entered and removed without helper programs.

A thread may be in another namespace than its process. All work inside one is done by a thread of
its own that ends afterwards, so no pool thread ever comes back in a foreign namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
MS_BIND = 4096
MNT_DETACH = 2
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _in_thread(work: Callable[[], T]) -> T:
    outcome: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target, name="netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def create(path: Path) -> None:
    """Make a namespace and pin it at ``path`` (a bind mount, as `ip netns` does). Blocking."""

    def work() -> None:
        _checked(_libc.unshare(CLONE_NEWNET), "unshare")
        source, target = b"/proc/thread-self/ns/net", str(path).encode()
        _checked(_libc.mount(source, target, b"none", MS_BIND, None), f"mount {path}")

    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o444)
    try:
        _in_thread(work)
    except BaseException:
        path.unlink()
        raise


def delete(path: Path) -> None:
    """Unpin; the kernel frees the namespace with its last user. Not there is success."""
    with contextlib.suppress(FileNotFoundError):
        while _libc.umount2(str(path).encode(), MNT_DETACH) == 0:
            pass  # a crash between mount and record may have left two
        path.unlink()


def inside(path: Path, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that is in the namespace at ``path``. Blocking; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:

        def entered() -> T:
            _checked(_libc.setns(fd, CLONE_NEWNET), f"setns {path}")
            return work()

        return _in_thread(entered)
    finally:
        os.close(fd)


def open_tap(path: Path, name: str) -> int:
    """A descriptor of the tap ``name`` in the namespace, with vnet headers as QEMU wants them."""

    def work() -> int:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        try:
            flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
            fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        except BaseException:
            os.close(fd)
            raise
        return fd

    return inside(path, work)
