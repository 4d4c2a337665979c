"""Trees of files as GNU tar streams: holes stay holes, what comes out of a sandbox stays inside.

A stream is made and read by a thread at the other end of a pipe, so its size is bounded by the
pipe's. What a guest sends is not trusted: names that leave the folder, and entries behind a link,
are refused before they are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tarfile
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from typing import IO, ClassVar

from agentenv.concurrency import Tasks
from agentenv.errors import GuestError, UserError

CHUNK = 256 << 10  # bytes
# GNU's sparse headers: four extents in the first, 21 in each that follows; numbers of 12 bytes.
_IN_HEADER, _IN_EXTENSION, _NUMBER = 4, 21, 12
_SPARSE_AT, _EXTENDED_AT, _REAL_SIZE_AT, _CHECKSUM_AT = 386, 482, 483, 148
_BLOCK = 512
Extent = tuple[int, int]


async def pack(source: Path, name: str) -> AsyncGenerator[bytes, None]:
    """The tree at ``source`` as a tar whose entries begin with ``name``. Raises UserError."""
    if not os.path.lexists(source):
        raise UserError(f"{source} does not exist", code="no_such_file")
    read, write = os.pipe()
    tasks = Tasks()
    packing = tasks.start(asyncio.to_thread(_pack_into, source, name, write), "pack", awaited=True)
    try:
        while piece := await asyncio.to_thread(os.read, read, CHUNK):
            yield piece
        await packing
    except OSError as error:
        raise UserError(f"{source} cannot be read", why=str(error), code="unreadable") from error
    finally:
        os.close(read)  # the thread's next write fails, if there is one
        with contextlib.suppress(Exception):
            await packing


def _pack_into(source: Path, name: str, fd: int) -> None:
    with (
        contextlib.suppress(BrokenPipeError),  # the reader has left
        open(fd, "wb", buffering=CHUNK) as out,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as tar,
    ):
        _add(tar, source, name)


def _add(tar: tarfile.TarFile, source: Path, name: str) -> None:
    """All below ``source``, parents first; a stack of our own, for trees deeper than Python's."""
    waiting = [(source, name)]
    while waiting:
        path, inner = waiting.pop()
        _add_one(tar, path, inner)
        if _is_folder(path):
            names = sorted(os.listdir(path), reverse=True)
            waiting += [(path / child, f"{inner}/{child}") for child in names]


def _add_one(tar: tarfile.TarFile, path: Path, name: str) -> None:
    info = tar.gettarinfo(path, arcname=name)
    if info is None:  # pyright: ignore[reportUnnecessaryComparison]  # a socket
        return
    info.uname = info.gname = ""  # numbers: names mean others elsewhere
    info.mtime = max(0, info.mtime)  # before 1970: as 1970
    if not info.isreg():
        tar.addfile(info)
        return
    with path.open("rb") as file:
        extents = _extents(file.fileno(), info.size)
        if extents is None:
            tar.addfile(info, file)
        else:
            _add_sparse(tar, info, file, extents)


def _extents(fd: int, size: int) -> list[Extent] | None:
    """Where a file has data, as (offset, length); None if it has no holes."""
    found: list[Extent] = []
    at = 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # there is no data behind here
                return None
            break
        found.append((begin, at - begin))
    os.lseek(fd, 0, os.SEEK_SET)
    return None if found == [(0, size)] or size == 0 else found


def _add_sparse(
    tar: tarfile.TarFile, info: tarfile.TarInfo, file: IO[bytes], extents: list[Extent]
) -> None:
    """An entry of GNU's type ``S``; a last extent of length 0 marks the file's end."""
    for block in sparse_header(info, extents):
        tar.fileobj.write(block)  # pyright: ignore[reportOptionalMemberAccess]
    stored = 0
    for offset, length in extents:
        file.seek(offset)
        tarfile.copyfileobj(file, tar.fileobj, length)  # pyright: ignore
        stored += length
    tar.fileobj.write(bytes(-stored % _BLOCK))  # pyright: ignore[reportOptionalMemberAccess]


def sparse_header(info: tarfile.TarInfo, extents: list[Extent]) -> list[bytes]:
    """The header blocks of a file of ``info.size`` bytes with data at ``extents``. Pure."""
    pairs = [*extents, (info.size, 0)]
    size, info.size = info.size, sum(length for _, length in extents)
    info.type = tarfile.GNUTYPE_SPARSE
    whole = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    before, header = whole[:-_BLOCK], bytearray(whole[-_BLOCK:])
    _put_pairs(header, _SPARSE_AT, pairs[:_IN_HEADER])
    header[_EXTENDED_AT] = len(pairs) > _IN_HEADER
    header[_REAL_SIZE_AT : _REAL_SIZE_AT + _NUMBER] = _number(size)
    header[_CHECKSUM_AT : _CHECKSUM_AT + 8] = b" " * 8
    header[_CHECKSUM_AT : _CHECKSUM_AT + 8] = b"%06o\0 " % sum(header)
    blocks = [before, bytes(header)]
    for at in range(_IN_HEADER, len(pairs), _IN_EXTENSION):
        block = bytearray(_BLOCK)
        _put_pairs(block, 0, pairs[at : at + _IN_EXTENSION])
        block[_IN_EXTENSION * 2 * _NUMBER] = at + _IN_EXTENSION < len(pairs)
        blocks.append(bytes(block))
    return blocks


def _put_pairs(block: bytearray, at: int, pairs: list[Extent]) -> None:
    for offset, length in pairs:
        block[at : at + 2 * _NUMBER] = _number(offset) + _number(length)
        at += 2 * _NUMBER


def _number(value: int) -> bytes:
    """Octal where it fits, else base 256 with the first bit set."""
    if value < 8 ** (_NUMBER - 1):
        return b"%011o\0" % value
    return b"\x80" + value.to_bytes(_NUMBER - 1, "big")


async def unpack(
    pieces: AsyncIterable[bytes], folder: Path, *, name: str | None, special: bool
) -> None:
    """Unpack below ``folder``, which exists, the first name replaced by ``name``.

    Raises GuestError (``guest_archive``) for a damaged or hostile stream, UserError for what cannot
    be written here.
    """
    read, write = os.pipe()
    tasks = Tasks()
    unpacker = Unpacker(folder, name, special)
    work = tasks.start(asyncio.to_thread(unpacker.run, read), "unpack", awaited=True)
    try:
        async for piece in pieces:
            await asyncio.to_thread(_write_all, write, piece)
    except BrokenPipeError:
        pass  # the reason is the thread's
    finally:
        os.close(write)
        with contextlib.suppress(Exception):
            await work
    try:
        work.result()
    except OSError as error:
        raise UserError(f"{folder} cannot be written", why=str(error), code="unwritable") from error
    except Exception as error:  # whatever the reader makes of hostile bytes
        raise GuestError(
            "the sandbox's archive is refused", why=str(error), code="guest_archive"
        ) from error


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Unpacker:
    """Writes a tree; an entry is looked at before anything of it is written.

    A folder that it has made or found is never replaced, so the way to every entry stays what it
    was when it was looked at.
    """

    def __init__(self, folder: Path, name: str | None, special: bool) -> None:
        self._folder, self._name, self._special = folder, name, special
        self._made: set[str] = set()
        self._folders: dict[str, tarfile.TarInfo] = {}
        self._passed: set[str] = set()  # folders that were looked at, and stay folders

    def run(self, fd: int) -> None:
        with open(fd, "rb", buffering=CHUNK) as source:
            header = type("Header", (_Header,), {})  # one for each archive: it notes the end
            with _Reader.open(fileobj=source, mode="r|", tarinfo=header) as tar:
                for info in tar:
                    self._extract(tar, info)
                if not header.ended:
                    raise ValueError("it ends before its end")
            for name, info in reversed(self._folders.items()):
                self._finish(self._folder / name, info)  # their content has changed their times
            while source.read(CHUNK):
                pass  # what follows the end, so that the sender is not cut off

    def _extract(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        info.name = self._renamed(info.name).rstrip("/")
        self._must_stay_inside(info.name)
        if info.islnk():
            info.linkname = self._renamed(info.linkname)
            if info.linkname not in self._made:
                raise ValueError(f"{info.name!r} is a hard link to what is not in the archive")
        if not self._special:
            if info.ischr() or info.isblk():
                return
            info.mode &= 0o777
        place = self._folder / info.name
        if info.isdir():
            if not _is_folder(place):
                place.mkdir(mode=0o700)  # its own mode comes at the end
            self._folders[info.name] = info
            self._passed.add(info.name)
            return
        if os.path.lexists(place) and not _is_folder(place):
            place.unlink()
        tar.extract(info, self._folder, numeric_owner=True)
        if not info.issym():
            self._made.add(info.name)

    @staticmethod
    def _finish(place: Path, info: tarfile.TarInfo) -> None:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.geteuid() == 0:
                os.fchown(fd, info.uid, info.gid)
            os.fchmod(fd, info.mode)
            os.utime(fd, (info.mtime, info.mtime))
        finally:
            os.close(fd)

    def _renamed(self, name: str) -> str:
        first, slash, rest = name.partition("/")
        return (self._name if self._name is not None else first) + slash + rest

    def _must_stay_inside(self, name: str) -> None:
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"the name {name!r} leads out of the folder")
        parent = name.rpartition("/")[0]
        if parent in self._passed:
            return
        place = self._folder
        for part in parts[:-1]:
            place /= part
            if not _is_folder(place):
                raise ValueError(f"{name!r} lies behind {place}, which is no folder")
        self._passed.add(parent)


def _is_folder(place: Path) -> bool:
    """A folder itself, not a link to one."""
    return place.is_dir() and not place.is_symlink()


class _Header(tarfile.TarInfo):
    """The library takes a damaged header behind the first, or none, for the archive's end."""

    ended: ClassVar[bool] = False

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> tarfile.TarInfo:
        if len(buf) == _BLOCK and not any(buf):
            cls.ended = True
            return super().frombuf(buf, encoding, errors)  # raises what ends the iteration
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise ValueError(f"damaged: {error}") from error


class _Reader(tarfile.TarFile):
    """The library's own filters (3.11.4 and later) would alter what we have looked at already."""

    @staticmethod
    def extraction_filter(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:  # noqa: ARG004
        return member
