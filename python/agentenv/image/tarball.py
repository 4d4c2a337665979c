"""Images of one layer: a plain tar, a folder, a Debian suite. Their digest is their content's."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import stat
import tarfile
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.concurrency import interruptible
from agentenv.errors import ImageError, faults
from agentenv.image.compression import plain
from agentenv.image.source import OpenBlob, Report, SourceLayer
from agentenv.model import ImageConfig
from agentenv.store.drafts import Drafts

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class TarImage:
    """Implements ``ImageSource`` over one tar file, compressed or not."""

    path: Path
    diff_id: str

    @property
    def digest(self) -> str:
        return self.diff_id

    @property
    def config(self) -> ImageConfig:
        return ImageConfig(env=(PATH,), cmd=("/bin/sh",))

    @property
    def layers(self) -> tuple[SourceLayer, ...]:
        return (SourceLayer(self.diff_id, self.diff_id, self.path.stat().st_size),)

    @asynccontextmanager
    async def blob(self, layer: SourceLayer, report: Report) -> AsyncGenerator[OpenBlob]:
        report(layer.digest, "fetch", layer.size, layer.size)
        yield lambda: self.path.open("rb")


async def open_tar(path: Path) -> TarImage:
    """Raises ImageError if it is cut short, InfraError if it cannot be read."""

    def work(stop: threading.Event) -> str:
        hasher = hashlib.sha256()
        with faults(f"{path} cannot be read"), path.open("rb") as file:
            for chunk in plain(file):
                hasher.update(chunk)
                if stop.is_set():
                    break
        return "sha256:" + hasher.hexdigest()

    try:
        return TarImage(path, await interruptible(work))
    except (EOFError, ValueError) as error:
        raise ImageError(f"{path} cannot be read", why=str(error), code="layer_invalid") from error


@asynccontextmanager
async def opened_folder(folder: Path, drafts: Drafts) -> AsyncGenerator[TarImage]:
    """The folder's content as a tar that is the same whenever the content is."""
    async with drafts.draft() as draft:
        await interruptible(lambda stop: write_tar(folder, draft.path, stop))
        yield await open_tar(draft.path)


def write_tar(folder: Path, target: Path, stop: threading.Event) -> None:
    """Write a deterministic tar of ``folder``: sorted, with owners, xattrs and hard links."""
    seen: dict[tuple[int, int], str] = {}
    with (
        faults(f"{folder} could not be read whole"),
        tarfile.open(target, "w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive,
    ):
        for path in _walk(folder):
            if stop.is_set():
                return
            _add(archive, folder, path, seen)


def _walk(folder: Path) -> list[Path]:
    found = [folder]
    for current, folders, files in os.walk(folder):
        found += [Path(current) / name for name in (*folders, *files)]
    return sorted(found, key=os.fsencode)


def _add(
    archive: tarfile.TarFile, folder: Path, path: Path, seen: dict[tuple[int, int], str]
) -> None:
    info = path.lstat()
    if stat.S_ISSOCK(info.st_mode):
        return  # a socket is nothing without its process
    name = "./" + str(path.relative_to(folder))
    member = tarfile.TarInfo(name)
    member.mode, member.uid, member.gid = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid
    member.mtime = info.st_mtime_ns // 10**9
    headers = {"mtime": f"{info.st_mtime_ns // 10**9}.{info.st_mtime_ns % 10**9:09d}"}
    headers |= {
        f"SCHILY.xattr.{key}": os.getxattr(path, key, follow_symlinks=False).decode(
            "utf-8", "surrogateescape"
        )
        for key in _xattrs(path)
    }
    member.pax_headers = headers
    key = (info.st_dev, info.st_ino)
    if not stat.S_ISDIR(info.st_mode) and key in seen:
        member.type, member.linkname = tarfile.LNKTYPE, seen[key]
        archive.addfile(member)
        return
    seen[key] = name
    if stat.S_ISREG(info.st_mode):
        member.size = info.st_size
        with path.open("rb") as file:
            archive.addfile(member, file)
        return
    if stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
    elif stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISFIFO(info.st_mode):
        member.type = tarfile.FIFOTYPE
    else:
        member.type = tarfile.CHRTYPE if stat.S_ISCHR(info.st_mode) else tarfile.BLKTYPE
        member.devmajor, member.devminor = os.major(info.st_rdev), os.minor(info.st_rdev)
    archive.addfile(member)


def _xattrs(path: Path) -> list[str]:
    try:
        return sorted(os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            return []
        raise


async def path_must_exist(path: Path, *, folder: bool) -> None:
    """Raises ImageError (``image_not_found``)."""
    there = await asyncio.to_thread(path.is_dir if folder else path.is_file)
    if not there:
        raise ImageError(
            f"{path} is no {'folder' if folder else 'file'}", code="image_not_found",
            http_status=404,
        )  # fmt: skip
