"""Compares an image as Linux mounts it with the tree it was made from, and that with its source.

Two questions: is what is stored whole and mounts as recorded (always), and does the source, read
again, convert to the same bytes (where the source can still be read).
"""

from __future__ import annotations

import asyncio
import filecmp
import hashlib
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from agentenv.concurrency import interruptible
from agentenv.errors import AgentEnvError
from agentenv.host.mount import mounted
from agentenv.image.open import opened
from agentenv.image.reference import DebianImage, ShippedImage, parse
from agentenv.image.registry import RegistrySettings
from agentenv.image.source import ImageSource, SourceLayer, quiet
from agentenv.layer import convert
from agentenv.layer.catalog import Image
from agentenv.layer.layers import Layers, Part, damaged
from agentenv.layer.tree import HOLE, IMPLIED, Chunks, Directory, Inode, Kind, Node, walk
from agentenv.layer.unpack import HOLES_FROM, ChunkHasher, chunk_span

_FORMATS = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFCHR: Kind.CHARACTER,
    stat.S_IFBLK: Kind.BLOCK,
    stat.S_IFIFO: Kind.FIFO,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs at ``path``."""

    path: str
    what: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """``entries`` were compared; ``source`` says how the second question went."""

    entries: int
    differences: tuple[Difference, ...]
    source: str


async def verify(layers: Layers, image: Image, settings: RegistrySettings) -> Verdict:
    """Raises ImageError (``image_incomplete``), InfraError (``layer_damaged``)."""
    root, _ = await convert.load_tree(layers, image.diff_ids)
    async with layers.drafts.draft() as draft:
        await layers.unpack(image.parts, draft.path)
        async with mounted(draft.path, "erofs", ("ro", "loop")) as folder:
            found, entries = await interruptible(lambda stop: compare(root, folder, stop))
    return Verdict(entries, tuple(found), await _source(layers, image, settings))


def compare(root: Directory, folder: Path, stop: threading.Event) -> tuple[list[Difference], int]:
    """Every entry of the tree with the one mounted below ``folder``; and how many there were."""
    differences: list[Difference] = []
    inodes: dict[int, int] = {}
    entries = 0
    for path, node in walk(root):
        if stop.is_set():
            break
        entries += 1
        where = b"/".join((os.fsencode(folder), *path))
        shown = "/" + os.fsdecode(b"/".join(path))
        try:
            wanted, seen = _expected(node), _found(where, node)
        except OSError as error:
            differences.append(Difference(shown, "entry", "present", str(error.strerror)))
            continue
        for what, value in wanted.items():
            if seen[what] != value:
                differences.append(Difference(shown, what, str(value), str(seen[what])))
        if isinstance(node, Inode):
            number = os.lstat(where).st_ino
            if inodes.setdefault(id(node), number) != number:
                differences.append(Difference(shown, "hard link", "same file", "another"))
    return differences, entries


def _inode(node: Node) -> Inode:
    if isinstance(node, Directory):
        return node.inode or IMPLIED
    assert isinstance(node, Inode)
    return node


def _expected(node: Node) -> dict[str, object]:
    inode = _inode(node)
    facts: dict[str, object] = {
        "kind": inode.kind,
        "mode": f"{inode.mode:04o}",
        "owner": (inode.uid, inode.gid),
        "time": inode.mtime,
        "attributes": dict(inode.xattrs),
    }
    if isinstance(node, Directory):
        return {**facts, "names": sorted(node.children)}
    match inode.kind:
        case Kind.FILE:
            return {**facts, "size": inode.size, "sha256": inode.sha256}
        case Kind.SYMLINK:
            return {**facts, "target": inode.target}
        case Kind.CHARACTER | Kind.BLOCK:
            return {**facts, "device": inode.device}
        case _:
            return facts


def _found(path: bytes, node: Node) -> dict[str, object]:
    info = os.lstat(path)
    kind = _FORMATS.get(stat.S_IFMT(info.st_mode))
    facts: dict[str, object] = {
        "kind": kind,
        "mode": f"{stat.S_IMODE(info.st_mode):04o}",
        "owner": (info.st_uid, info.st_gid),
        "time": (info.st_mtime_ns // 10**9, info.st_mtime_ns % 10**9),
        "attributes": {
            os.fsencode(name): os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
        },
        "size": info.st_size,
        "device": (os.major(info.st_rdev), os.minor(info.st_rdev)),
        "names": sorted(os.listdir(path)) if kind is Kind.DIRECTORY else None,
        "target": os.readlink(path) if kind is Kind.SYMLINK else None,
        "sha256": None,
    }
    if kind is Kind.FILE and _inode(node).kind is Kind.FILE:
        facts["sha256"] = _hash(path, _inode(node))
    return facts


def _hash(path: bytes, inode: Inode) -> str:
    """The digest as it was made; what is recorded as a hole is not read."""
    with open(path, "rb") as file:  # noqa: PTH123 (a path of bytes)
        size = os.fstat(file.fileno()).st_size
        if size < HOLES_FROM:
            return hashlib.file_digest(file, "sha256").hexdigest()
        hasher, span = ChunkHasher(), chunk_span(size)
        holes = inode.content.at if isinstance(inode.content, Chunks) else ()
        for number, offset in enumerate(range(0, size, span)):
            if number < len(holes) and holes[number] == HOLE:
                continue
            file.seek(offset)
            hasher.add(number, file.read(span))
        return hasher.hexdigest()


async def _source(layers: Layers, image: Image, settings: RegistrySettings) -> str:
    reference = parse(image.reference)
    if isinstance(reference, DebianImage | ShippedImage):
        return "not compared: built from packages, which change"
    stored = dict(zip(image.diff_ids, image.parts[1:], strict=True))
    try:
        async with opened(reference, settings, layers.drafts) as source:
            if source.digest != image.digest:
                return f"not compared: {image.reference} is another image by now"
            for layer in source.layers:
                await _layer(layers, source, layer, stored[layer.diff_id])
    except AgentEnvError as error:
        if error.code == "layer_damaged":
            raise
        return f"not compared: {error.message}"
    return "the same"


async def _layer(layers: Layers, source: ImageSource, layer: SourceLayer, part: Part) -> None:
    """Raises InfraError (``layer_damaged``) if it is stored differently from its source."""
    async with (
        source.blob(layer, quiet) as open_blob,
        layers.drafts.draft() as made,
        layers.drafts.draft() as stored,
    ):
        await interruptible(lambda stop: convert.unpack(made.path, open_blob, lambda _: None, stop))
        await layers.unpack([part], stored.path)
        if not await asyncio.to_thread(filecmp.cmp, stored.path, made.path, shallow=False):
            raise damaged(layer.digest, "it differs from its source")
