"""Images as folders: each mounted once by the host, for all machines that are made from it.

All sandboxes of an image share its pages in the host's cache that way. Who uses a mount is noted as
files beside it, for servers to come:

    NAME.image/     where the image is mounted
    NAME/           with the agent in its root, which a guest takes away when it starts
    NAME.users/ID   a machine that uses it
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Set
from pathlib import Path

from agentenv.concurrency import KeyedLocks
from agentenv.engine.gvisor.bundle import AGENT, SUDO
from agentenv.errors import faults
from agentenv.host import mount

USERS = ".users"


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

        Raises InfraError.
        """
        assert self._below
        point = await asyncio.to_thread(self._point, image)
        async with self._locks.hold(point.name):
            with faults("the image's folder could not be made"):
                users = point.with_name(point.name + USERS)
                for folder in (point, _image_of(point), users):
                    folder.mkdir(parents=True, exist_ok=True)
                (users / machine).touch()
            with faults("the image could not be mounted"):
                if not os.path.ismount(_image_of(point)):
                    await mount.attach_file(image, _image_of(point), "erofs")
                if not os.path.ismount(point):
                    # The image's own entries hide those below, and its root's mode counts.
                    lower = f"lowerdir={_image_of(point)}:{self._below}"
                    await asyncio.to_thread(mount.attach, "none", point, "overlay", lower)
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
                with faults("the image's folder could not be removed"):
                    for mounted in (point, _image_of(point)):
                        await asyncio.to_thread(mount.detach, mounted)
                        mounted.rmdir()
                    users.rmdir()


def _image_of(point: Path) -> Path:
    return point.with_name(point.name + ".image")
