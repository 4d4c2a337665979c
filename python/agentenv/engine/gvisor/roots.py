"""Images as folders: each mounted once by the host, for all machines that are made from it.

All sandboxes of an image share its pages in the host's cache that way. Who uses a mount is noted as
files beside it, for servers to come:

    NAME.image/     where the image is mounted
    NAME/           with the agent in its root, which a guest takes away when it starts
    NAME.users/ID   a machine that uses it
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Set
from pathlib import Path

from agentenv.concurrency import KeyedLocks
from agentenv.engine.gvisor.bundle import AGENT, SUDO
from agentenv.errors import InfraError, faults
from agentenv.host.process import run

MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MNT_DETACH = 2
DEADLINE = 60.0  # seconds
USERS = ".users"
_libc = ctypes.CDLL(None, use_errno=True)


class RootMounts:
    """Those in ``folder``; ``prepare`` first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks = KeyedLocks()
        self._below: Path | None = None

    def prepare(self, agent: Path, sudo: Path) -> None:
        """Have a folder with our programs, to lie below every image. Blocking.

        Raises InfraError.
        """
        with faults("the agent could not be laid out"):
            programs = {AGENT: agent.read_bytes(), SUDO: sudo.read_bytes()}
            digest = hashlib.blake2s(b"".join(programs.values()), digest_size=8).hexdigest()
            below = self._folder / f"agent-{digest}"
            if not below.exists():
                fresh = self._folder / f".{below.name}"
                fresh.mkdir(parents=True, exist_ok=True)
                for name, data in programs.items():
                    (fresh / name).write_bytes(data)
                    (fresh / name).chmod(0o755)
                fresh.rename(below)
        self._below = below

    def remove(self) -> None:
        """What ``prepare`` made. Blocking."""
        for below in (*self._folder.glob("agent-*"), *self._folder.glob(".agent-*")):
            shutil.rmtree(below)

    async def hold(self, image: Path, machine: str) -> Path:
        """The folder of an EROFS image, mounted for ``machine`` until ``release``.

        Raises InfraError (``mount_failed``).
        """
        assert self._below
        point = await asyncio.to_thread(self._point, image)
        async with self._locks.hold(point.name):
            with faults("the image's folder could not be made"):
                users = point.with_name(point.name + USERS)
                for folder in (point, _image_of(point), users):
                    folder.mkdir(parents=True, exist_ok=True)
                (users / machine).touch()
            if not os.path.ismount(_image_of(point)):
                await _mount_image(image, _image_of(point))
            if not os.path.ismount(point):
                # The image's own entries hide those below, and its root's mode counts.
                lower = f"lowerdir={_image_of(point)}:{self._below}"
                await asyncio.to_thread(_mount, "none", point, "overlay", lower)
        return point

    def _point(self, image: Path) -> Path:
        """By the file system, too, that shows the image: one that died may be mounted still."""
        with faults(f"the image {image.name} cannot be found"):
            return self._folder / f"{image.name}-{image.stat().st_dev:x}"

    async def release(self, machine: str) -> None:
        """A machine that uses none is success."""
        for noted in self._folder.glob(f"*{USERS}/{machine}"):
            await self._drop(noted)

    async def keep_only(self, machines: Set[str]) -> None:
        """Whoever else uses a mount does so no more."""
        for noted in self._folder.glob(f"*{USERS}/*"):
            if noted.name not in machines:
                await self._drop(noted)

    async def _drop(self, noted: Path) -> None:
        users = noted.parent
        point = users.with_suffix("")
        async with self._locks.hold(point.name):
            noted.unlink(missing_ok=True)
            if users.exists() and not any(users.iterdir()):
                for mounted in (point, _image_of(point)):
                    await asyncio.to_thread(_unmount, mounted)
                users.rmdir()


def _image_of(point: Path) -> Path:
    return point.with_name(point.name + ".image")


async def _mount_image(image: Path, point: Path) -> None:
    try:
        await asyncio.to_thread(_mount, image, point, "erofs", "")
    except InfraError as error:
        # Kernels before 6.12, and all of them for a file of FUSE's, mount devices only.
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.ENOTBLK:
            raise
        words = ("mount", "-t", "erofs", "-o", "loop,ro,nosuid,nodev")
        await run((*words, str(image), str(point)), timeout=DEADLINE)


def _mount(source: Path | str, point: Path, kind: str, options: str) -> None:
    # To the host its devices and setuid programs are nothing; the guest's kernel has its own rules.
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    words = (os.fsencode(source), os.fsencode(point), kind.encode(), flags, options.encode())
    if _libc.mount(*words):
        number = ctypes.get_errno()
        error = OSError(number, f"{kind}: {os.strerror(number)}")
        what = "the image could not be mounted"
        raise InfraError(what, why=str(error), code="mount_failed") from error


def _unmount(point: Path) -> None:
    with faults("the image's folder could not be removed"):
        while os.path.ismount(point):
            if _libc.umount2(os.fsencode(point), MNT_DETACH):
                number = ctypes.get_errno()
                raise OSError(number, f"{point}: {os.strerror(number)}")
        point.rmdir()
