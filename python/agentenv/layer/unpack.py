"""From a tar's members to a layer's tree and data. Holes and repeated contents take no space.

Rules, where tools differ: a later entry replaces an earlier one of its name (folders keep their
children); a parent that is a symlink of this layer is followed inside the root, one that only a
lower layer has is not (a folder hides it, as in overlayfs); whiteouts hide lower entries only,
wherever they stand; absolute paths are taken relative to the root, paths that climb out are
refused.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable
from typing import BinaryIO, cast

from agentenv.errors import ImageError
from agentenv.image.compression import READ, Readable
from agentenv.layer.erofs import BLOCK, XATTR_PREFIXES
from agentenv.layer.tarstream import TarReader, members
from agentenv.layer.tree import HOLE, Chunks, Directory, Inode, Kind, Link, Node, Whiteout

WHITEOUT, OPAQUE = b".wh.", b".wh..wh..opq"
AUFS_PRIVATE = b".wh..wh."  # aufs's own book-keeping; only the opaque mark means anything to us
# overlayfs obeys these on lower files, and a guest's root is an overlay over the image.
OVERLAY_XATTRS = (b"trusted.overlay.", b"user.overlay.")
HOLES_FROM = 1 << 20  # bytes; smaller files are not looked through for holes
SPAN = 1 << 16  # bytes of a chunk, where that makes no more than MAX_CHUNKS
MAX_CHUNKS = 1 << 16
MAX_SIZE = 1 << 43  # 8 TiB: half of what EROFS addresses
MAX_ENTRIES = 10_000_000
MAX_DEPTH = 500  # of folders; trees are stacked by recursion
MAX_PATH = 4096  # bytes, Linux's PATH_MAX
MAX_FOLLOWED = 40  # symlinks on one path, as in Linux
_ZEROS = bytes(READ)
_KINDS = {
    tarfile.SYMTYPE: Kind.SYMLINK,
    tarfile.CHRTYPE: Kind.CHARACTER,
    tarfile.BLKTYPE: Kind.BLOCK,
    tarfile.FIFOTYPE: Kind.FIFO,
}


class Unpacker:
    """Builds one layer. ``data`` receives the contents, each at a multiple of 4096 bytes."""

    def __init__(self, data: BinaryIO) -> None:
        self.root = Directory()
        self.blocks = 0
        self._data = data
        self._known: dict[tuple[str, int], int] = {}

    def run(self, blob: Readable, check: Callable[[], None]) -> str:
        """Unpack the whole of ``blob``; its diff id. Raises ImageError, OSError."""
        reader = TarReader(blob, check)
        for count, member in enumerate(members(reader)):
            if count > MAX_ENTRIES:
                raise ImageError("the layer has too many entries", code="image_too_large")
            self._add(member, reader)
        return reader.drain()

    def _add(self, member: tarfile.TarInfo, reader: TarReader) -> None:
        path = split_path(member.name, "entry")
        if not path:
            if member.isdir():
                self.root.inode = _inode(member, Kind.DIRECTORY)
            return
        *above, name = path
        if name.startswith(WHITEOUT):
            self._whiteout(above, name)
            return
        folder = self._folder(above)
        node = self._node(member, folder, name, reader)
        if node is not None:
            folder.children[name] = node

    def _whiteout(self, above: list[bytes], name: bytes) -> None:
        if name == OPAQUE:
            self._folder(above).opaque = True
        elif not name.startswith(AUFS_PRIVATE):
            hidden = name.removeprefix(WHITEOUT)
            if hidden in (b"", b".", b".."):
                raise _bad_path("whiteout", name, "it hides nothing")
            beside = self._folder(above).children
            if isinstance(there := beside.setdefault(hidden, Whiteout()), Directory):
                there.opaque = True

    def _folder(self, path: list[bytes]) -> Directory:
        """The folder at ``path``, made where it is missing."""
        found = self._walk(path, make=True)
        assert found is not None
        return found

    def _walk(self, path: list[bytes], *, make: bool) -> Directory | None:
        """Down ``path`` from the root, symlinks of this layer followed; None if it ends."""
        todo, followed = path[::-1], 0
        trail = [self.root]
        while todo:
            name = todo.pop()
            if name == b"..":
                trail = trail[:-1] or trail  # `/..` is `/`
                continue
            below = trail[-1].children.get(name)
            if isinstance(below, Inode) and below.kind is Kind.SYMLINK:
                followed += 1
                if followed > MAX_FOLLOWED:
                    raise _bad_path("entry", b"/".join(path), "its symlinks go in circles")
                if below.target.startswith(b"/"):
                    trail = [self.root]
                todo += [part for part in below.target.split(b"/")[::-1] if part not in (b"", b".")]
                continue
            if not isinstance(below, Directory):
                if not make:
                    return None
                # A whiteout that stands first hides the lower folder whole.
                below = Directory(opaque=isinstance(below, Whiteout))
                trail[-1].children[name] = below
            trail.append(below)
            if len(trail) > MAX_DEPTH:
                shown = b"/".join(path)
                raise _bad_path("entry", shown, f"it lies deeper than {MAX_DEPTH} folders")
        return trail[-1]

    def _node(
        self, member: tarfile.TarInfo, folder: Directory, name: bytes, reader: TarReader
    ) -> Node | None:
        """The node of an entry; None for kinds that mean nothing in a layer."""
        if member.islnk():
            return self._link(member, name)
        if member.isdir():
            there = folder.children.get(name)
            hides = isinstance(there, Whiteout)
            made = there if isinstance(there, Directory) else Directory(opaque=hides)
            made.inode = _inode(member, Kind.DIRECTORY)
            return made
        if member.isreg():
            return self._file(member, reader)
        kind = _KINDS.get(member.type)
        if kind is None:
            return None
        inode = _inode(member, kind)
        if kind is Kind.SYMLINK:
            inode.target = _raw(member.linkname)
            if not 0 < len(inode.target) < BLOCK:
                raise _bad_path("symlink", name, "its target is empty or over 4095 bytes")
        elif kind is not Kind.FIFO:
            if not (0 <= member.devmajor < 1 << 12 and 0 <= member.devminor < 1 << 20):
                raise _bad_path("device", name, "its numbers are out of range")
            inode.device = (member.devmajor, member.devminor)
        return inode

    def _link(self, member: tarfile.TarInfo, name: bytes) -> Node:
        target = split_path(member.linkname, "hard link")
        if not target:
            raise _bad_path("hard link", name, "it links to the root")
        above = self._walk(target[:-1], make=False)
        found = above.children.get(target[-1]) if above else None
        if isinstance(found, Directory):
            raise _bad_path("hard link", name, "it links to a folder")
        if isinstance(found, Inode):
            return found
        return Link(tuple(target))

    def _file(self, member: tarfile.TarInfo, reader: TarReader) -> Inode:
        inode = _inode(member, Kind.FILE)
        inode.size = member.size
        if not 0 <= inode.size <= MAX_SIZE:
            raise ImageError(f"{member.name} has {inode.size} bytes", code="image_too_large")
        reader.seek(member.offset_data)
        # The stubs take it for bytes; it is the list of (offset, length) of stored regions.
        sparse = cast("list[tuple[int, int]] | None", member.sparse)
        parts = [(0, inode.size)] if sparse is None else sparse
        regions = _Regions(parts, inode.size, reader)
        if inode.size < HOLES_FROM:
            inode.sha256 = self._whole(inode, regions)
        else:
            inode.sha256 = self._chunked(inode, regions, reader)
        regions.finish()
        return inode

    def _whole(self, inode: Inode, regions: _Regions) -> str:
        """A small file: kept once even if the layer holds it twice."""
        content = regions.read(0, inode.size)
        digest = hashlib.sha256(content).hexdigest()
        at = self._known.get((digest, inode.size))
        if at is None:
            at = self.blocks
            self._write(content)
            self._known[digest, inode.size] = at
        inode.content = at
        return digest

    def _chunked(self, inode: Inode, regions: _Regions, reader: TarReader) -> str:
        """A large file, chunk by chunk. What is zero is neither stored nor hashed, so that a
        claim of terabytes costs nothing."""
        span = chunk_span(inode.size)
        at: list[int] = []
        hasher = ChunkHasher()
        first = self.blocks
        for number, offset in enumerate(range(0, inode.size, span)):
            reader.check()
            size = min(span, inode.size - offset)
            chunk = None if regions.hole(offset + size) else regions.read(offset, size)
            if chunk is None or _is_zero(chunk):
                at.append(HOLE)
                continue
            at.append(self.blocks)
            hasher.add(number, chunk)
            self._write(chunk)
        inode.content = Chunks(span // BLOCK, tuple(at)) if HOLE in at else first
        return hasher.hexdigest()

    def _write(self, content: bytes | bytearray) -> None:
        self._data.write(content)
        padding = -len(content) % BLOCK
        self._data.write(_ZEROS[:padding])
        self.blocks += (len(content) + padding) // BLOCK


def chunk_span(size: int) -> int:
    """Bytes of a chunk of a file of this size."""
    span = SPAN
    while size > span * MAX_CHUNKS:
        span *= 2
    return span


class ChunkHasher:
    """The digest of a file of HOLES_FROM bytes and more: SHA-256 over its chunks that are not
    zero, each led by its number as eight bytes, little-endian."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def add(self, number: int, chunk: bytes | bytearray) -> None:
        self._hasher.update(number.to_bytes(8, "little"))
        self._hasher.update(chunk)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


class _Regions:
    """The content of a possibly sparse member, read forward."""

    def __init__(self, parts: list[tuple[int, int]], size: int, reader: TarReader) -> None:
        self._parts = [(offset, length) for offset, length in parts if length > 0]
        self._parts.reverse()
        self._reader = reader
        end = 0
        for offset, length in reversed(self._parts):
            if offset < end or offset + length > size:
                raise ImageError("the map of a sparse file makes no sense", code="layer_invalid")
            end = offset + length

    def hole(self, end: int) -> bool:
        """Whether nothing is stored before ``end``."""
        return not self._parts or self._parts[-1][0] >= end

    def read(self, offset: int, size: int) -> bytes | bytearray:
        """The next ``size`` bytes, from ``offset``."""
        if not self._parts:
            return bytes(size)
        start, length = self._parts[-1]
        if start == offset and length >= size:
            self._advance(size)
            return _exactly(self._reader, size)
        chunk = bytearray(size)
        while self._parts and self._parts[-1][0] < offset + size:
            start, length = self._parts[-1]
            take = min(length, offset + size - start)
            chunk[start - offset : start - offset + take] = _exactly(self._reader, take)
            self._advance(take)
        return chunk

    def _advance(self, size: int) -> None:
        start, length = self._parts.pop()
        if length > size:
            self._parts.append((start + size, length - size))

    def finish(self) -> None:
        if self._parts:
            raise ImageError("the map of a sparse file makes no sense", code="layer_invalid")


def _exactly(reader: TarReader, size: int) -> bytes:
    content = reader.read(size)
    if len(content) < size:
        raise ImageError("the layer is cut short", why=f"at byte {reader.tell()}")
    return content


def _is_zero(chunk: bytes | bytearray) -> bool:
    size = len(chunk)
    return all(
        chunk[start : start + READ] == _ZEROS[: min(READ, size - start)]
        for start in range(0, size, READ)
    )


def split_path(text: str, what: str) -> list[bytes]:
    """The components of a path in a tar, relative to the root.

    Raises ImageError (``image_path_escape``) if it climbs out.
    """
    parts: list[bytes] = []
    raw = _raw(text)
    if len(raw) >= MAX_PATH or b"\0" in raw:
        raise _bad_path(what, raw, f"it holds a NUL or is over {MAX_PATH - 1} bytes")
    for part in raw.split(b"/"):
        if part in (b"", b"."):
            continue
        if part != b"..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            raise ImageError(
                f"the layer holds the path of a {what} outside of the root",
                why=f"its path is {text!r}",
                code="image_path_escape",
            )
        if len(part) > 255:
            raise _bad_path(what, part, "a name in it is over 255 bytes")
    return parts


def _bad_path(what: str, path: bytes, why: str) -> ImageError:
    shown = path.decode(errors="replace")[:120]
    return ImageError(f"the layer's {what} {shown!r} cannot be", why=why, code="image_bad_path")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _inode(member: tarfile.TarInfo, kind: Kind) -> Inode:
    if not (0 <= member.uid < 1 << 32 and 0 <= member.gid < 1 << 32):
        raise ImageError(f"{member.name} has an owner out of range", code="image_bad_owner")
    mode = 0o777 if kind is Kind.SYMLINK else member.mode & 0o7777
    return Inode(kind, mode, member.uid, member.gid, _time(member), _xattrs(member))


def _time(member: tarfile.TarInfo) -> tuple[int, int]:
    """Seconds and nanoseconds; times before 1970 are taken for 1970."""
    text = member.pax_headers.get("mtime")
    if text is None:
        return max(0, int(member.mtime)), 0
    seconds, _, fraction = text.partition(".")
    try:
        whole, parts = int(seconds), int((fraction + "000000000")[:9])
    except ValueError as error:
        raise ImageError(f"{member.name} has a bad time", why=text) from error
    return (whole, parts) if 0 <= whole < 1 << 63 else (0, 0)


def _xattrs(member: tarfile.TarInfo) -> tuple[tuple[bytes, bytes], ...]:
    found: list[tuple[bytes, bytes]] = []
    for key, value in member.pax_headers.items():
        if not key.startswith("SCHILY.xattr."):
            continue
        name = _raw(key.removeprefix("SCHILY.xattr."))
        if name.startswith(OVERLAY_XATTRS):
            continue
        if len(name) > 255 or len(value) > 65535:
            raise ImageError(f"{member.name} has an attribute too long", code="image_bad_xattr")
        if name.startswith(tuple(prefix for prefix, _ in XATTR_PREFIXES)):
            found.append((name, _raw(value)))
    return tuple(sorted(found))
