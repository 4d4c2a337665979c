"""Writes the metadata of an image as an EROFS file system over its layers' data. Pure but for
the file it writes.

The result is read as one flat block file: this metadata, then each layer's data in order, every
part a multiple of 4096 bytes. File contents are addressed by their block in that flat file, so a
layer's data is stored once for all images that hold it, and Linux mounts the whole without help.

Format: the kernel's fs/erofs/erofs_fs.h, uncompressed; all inodes are of the extended version
(64 bytes: full uid, gid, size and mtime). Small directories and symlinks are inlined behind
their inode (FLAT_INLINE), files with holes are chunk-based with a 4-byte block map, everything
else is FLAT_PLAIN.

    block 0   superblock at byte 1024
    block 1   inodes, each at a multiple of 32 bytes, with xattrs, inline data, block maps
    block i   larger directories and symlinks
    block m   data of layer 1, data of layer 2, ...
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from agentenv.errors import ImageError
from agentenv.layer.tree import HOLE, IMPLIED, Chunks, Directory, Inode, Kind

BLOCK = 4096
MAGIC = 0xE0F5E1E2
SUPERBLOCK_AT = 1024
FIRST_INODE = BLOCK
FEATURE_COMPAT = 0x1 | 0x2  # SB_CHKSUM, MTIME
FEATURE_INCOMPAT = 0x4  # CHUNKED_FILE
PLAIN, INLINE, CHUNKED = 0, 2, 4  # data layouts
INODE_SIZE, SLOT = 64, 32
DIRENT = struct.Struct("<QHBB")
SUPERBLOCK = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
INODE = struct.Struct("<HHHHQIIIIQII16x")
XATTR_PREFIXES = (  # name prefix -> index; longest first where one contains another
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"user.", 1),
    (b"trusted.", 4),
    (b"security.", 6),
)
MAX_XATTR_SPACE = 65536
NO_BLOCK = 0xFFFFFFFF
_KINDS = {  # kind -> (S_IF bits, directory entry type)
    Kind.FILE: (0o100000, 1),
    Kind.DIRECTORY: (0o040000, 2),
    Kind.CHARACTER: (0o020000, 3),
    Kind.BLOCK: (0o060000, 4),
    Kind.FIFO: (0o010000, 5),
    Kind.SYMLINK: (0o120000, 7),
}


@dataclass(slots=True, eq=False)
class _Placed:
    """An inode on its way to disk. ``entries`` (name, child) in byte order for a directory."""

    inode: Inode
    xattrs: bytes
    links: int = 1
    entries: list[tuple[bytes, _Placed]] = field(default_factory=list[tuple[bytes, "_Placed"]])
    groups: list[int] = field(default_factory=list[int])  # entries per directory block
    layout: int = PLAIN
    length: int = 0  # of directory data or symlink target
    at: int = 0  # byte offset of the inode
    block: int = 0  # first block of its own data

    @property
    def nid(self) -> int:
        return self.at // SLOT


def write(root: Directory, layer_blocks: Sequence[int], uuid: bytes, out: BinaryIO) -> int:
    """Write the metadata of ``root`` over layers of so many blocks each; return its blocks.

    ``uuid`` are 16 bytes. Equal input gives equal bytes. Raises ImageError for what EROFS cannot
    hold: a name over 255 bytes, extended attributes over 64 KiB on one file.
    """
    inodes = _collect(root)
    for placed in inodes:
        _measure(placed)
    end = _place_inodes(inodes)
    blocks = _place_blocks(inodes, -(-end // BLOCK))
    bases = [blocks]
    for count in layer_blocks:
        bases.append(bases[-1] + count)
    if bases[-1] >= NO_BLOCK:
        raise ImageError("the image is larger than 16 TiB", code="image_too_large")
    out.write(_superblock(inodes, bases[-1], uuid))
    position = FIRST_INODE
    for placed in inodes:
        out.write(bytes(placed.at - position))
        position = placed.at + out.write(_inode_bytes(placed, bases))
    out.write(bytes(-position % BLOCK))
    for placed in inodes:
        if placed.layout == PLAIN and placed.length:
            data = _own_data(placed)
            out.write(data + bytes(-len(data) % BLOCK))
    return blocks


def _collect(root: Directory) -> list[_Placed]:
    """All inodes, root first, each directory's children behind it."""
    seen: dict[int, _Placed] = {}
    order: list[_Placed] = []

    def place(inode: Inode) -> _Placed:
        placed = _Placed(inode, _xattr_bytes(inode.xattrs))
        order.append(placed)
        return placed

    top = place(root.inode or IMPLIED)
    todo = [(root, top, top)]
    while todo:
        folder, own, parent = todo.pop()
        entries = [(b".", own), (b"..", parent)]
        own.links = 2
        for name, node in folder.children.items():
            if isinstance(node, Directory):
                child = place(node.inode or IMPLIED)
                todo.append((node, child, own))
                own.links += 1
            else:
                assert isinstance(node, Inode), "a stacked tree holds directories and inodes only"
                child = seen.get(id(node))
                if child is None:
                    child = seen[id(node)] = place(node)
                else:
                    child.links += 1
            entries.append((name, child))
        own.entries = sorted(entries, key=lambda entry: entry[0])
    return order


def _measure(placed: _Placed) -> None:
    """Choose the layout, compute the length of its own data."""
    match placed.inode.kind:
        case Kind.DIRECTORY:
            placed.groups, placed.length = _group(placed.entries)
        case Kind.SYMLINK:
            placed.length = len(placed.inode.target)
        case Kind.FILE if isinstance(placed.inode.content, Chunks):
            placed.layout = CHUNKED
            return
        case _:
            return
    if INODE_SIZE + len(placed.xattrs) + placed.length <= BLOCK:
        placed.layout = INLINE


def _group(entries: Sequence[tuple[bytes, _Placed]]) -> tuple[list[int], int]:
    """How many entries each directory block takes, and the directory's size in bytes."""
    groups: list[int] = []
    count = used = 0
    for name, _ in entries:
        if len(name) > 255:
            shown = name[:40].decode(errors="replace")
            raise ImageError(f"a name is longer than 255 bytes: {shown}…", code="image_bad_path")
        need = DIRENT.size + len(name)
        if used + need > BLOCK:
            groups.append(count)
            count = used = 0
        count, used = count + 1, used + need
    groups.append(count)
    return groups, (len(groups) - 1) * BLOCK + used


def _place_inodes(inodes: Sequence[_Placed]) -> int:
    """Set each inode's offset; return the end. Inline data must not cross a block."""
    position = FIRST_INODE
    for placed in inodes:
        size = INODE_SIZE + len(placed.xattrs)
        if placed.layout == INLINE:
            size += placed.length
            if position // BLOCK != (position + size - 1) // BLOCK:
                position = -(-position // BLOCK) * BLOCK
        elif isinstance(placed.inode.content, Chunks):
            size += 4 * len(placed.inode.content.at)
        placed.at = position
        position = -(-(position + size) // SLOT) * SLOT
    return position


def _place_blocks(inodes: Sequence[_Placed], first: int) -> int:
    """Set where larger directories and symlinks lie; return the block behind them."""
    for placed in inodes:
        if placed.layout == PLAIN and placed.length:
            placed.block = first
            first += -(-placed.length // BLOCK)
    return first


def _superblock(inodes: Sequence[_Placed], blocks: int, uuid: bytes) -> bytes:
    def packed(checksum: int) -> bytes:
        return SUPERBLOCK.pack(
            *(MAGIC, checksum, FEATURE_COMPAT, 12, 0, inodes[0].nid, len(inodes)),
            *(0, 0, blocks, 0, 0, uuid, b""),  # time 0, metadata from block 0, no shared xattrs
            *(FEATURE_INCOMPAT, 0, 0, 0, 0, 0, 0, 0, 0),
        )

    rest = bytes(BLOCK - SUPERBLOCK_AT - SUPERBLOCK.size)
    checksum = crc32c(packed(0) + rest)
    return bytes(SUPERBLOCK_AT) + packed(checksum) + rest


def _inode_bytes(placed: _Placed, bases: Sequence[int]) -> bytes:
    inode = placed.inode
    kind_bits, _ = _KINDS[inode.kind]
    seconds, nanoseconds = inode.mtime
    head = INODE.pack(
        1 | placed.layout << 1,
        (len(placed.xattrs) - 12) // 4 + 1 if placed.xattrs else 0,
        kind_bits | inode.mode,
        0,
        inode.size if inode.kind is Kind.FILE else placed.length,
        _union(placed, bases),
        placed.nid & 0xFFFFFFFF,
        inode.uid,
        inode.gid,
        seconds,
        nanoseconds,
        placed.links,
    )
    head += placed.xattrs
    if placed.layout == INLINE:
        return head + _own_data(placed)
    if isinstance(inode.content, Chunks):
        base = bases[inode.layer]
        at = (NO_BLOCK if block == HOLE else base + block for block in inode.content.at)
        return head + struct.pack(f"<{len(inode.content.at)}I", *at)
    return head


def _union(placed: _Placed, bases: Sequence[int]) -> int:
    """The four bytes whose meaning depends on kind and layout."""
    inode = placed.inode
    match inode.kind:
        case Kind.CHARACTER | Kind.BLOCK:
            major, minor = inode.device
            return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12
        case Kind.FILE if isinstance(inode.content, Chunks):
            return inode.content.span.bit_length() - 1
        case Kind.FILE:
            assert isinstance(inode.content, int)
            return bases[inode.layer] + inode.content if inode.size else NO_BLOCK
        case Kind.DIRECTORY | Kind.SYMLINK if placed.layout == PLAIN:
            return placed.block
        case _:
            return NO_BLOCK


def _own_data(placed: _Placed) -> bytes:
    if placed.inode.kind is Kind.SYMLINK:
        return placed.inode.target
    blocks: list[bytes] = []
    start = 0
    for count in placed.groups:
        group = placed.entries[start : start + count]
        start += count
        offset = DIRENT.size * count
        heads: list[bytes] = []
        for name, child in group:
            heads.append(DIRENT.pack(child.nid, offset, _KINDS[child.inode.kind][1], 0))
            offset += len(name)
        block = b"".join(heads) + b"".join(name for name, _ in group)
        blocks.append(block if start == len(placed.entries) else block.ljust(BLOCK, b"\0"))
    return b"".join(blocks)


def _xattr_bytes(xattrs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The inline attribute body: a 12-byte header, then entries padded to 4 bytes."""
    entries: list[bytes] = []
    for name, value in sorted(xattrs):
        for prefix, index in XATTR_PREFIXES:
            if name.startswith(prefix):
                rest = name[len(prefix) :]
                entry = struct.pack("<BBH", len(rest), index, len(value)) + rest + value
                entries.append(entry + bytes(-len(entry) % 4))
                break
    if not entries:
        return b""
    body = bytes(12) + b"".join(entries)
    if len(body) > MAX_XATTR_SPACE:
        raise ImageError("a file has more than 64 KiB of attributes", code="image_bad_xattr")
    return body


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) as the kernel computes it for EROFS: seed ~0, not inverted."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC_TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value


def _crc_table() -> list[int]:
    table: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return table


_CRC_TABLE = _crc_table()
