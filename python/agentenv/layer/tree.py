"""The tree of a layer, the tree of an image, and how layers stack. Pure.

A layer's tree holds what its tar says, applied to an empty folder: entries, whiteouts, opaque
folders, links to files of lower layers. ``stack`` lays one over another by overlayfs's rules, so
the tree of an image is what a container engine would show. Names are bytes: tars hold any.

Stored form (blob kind ``tree``): zlib over JSON lines. Line one is the header
``{"format": 1, "blocks": N}`` with N the 4096-byte blocks of the layer's data. Each further line
is a node, parents before children: ``p`` path, ``k`` kind, for kinds with an inode ``m`` mode,
``u`` ``g`` owner, ``t`` [seconds, nanoseconds], ``x`` [[name, value], …], then by kind ``s``
size, ``h`` digest (``unpack.ChunkHasher`` from 1 MiB on, else SHA-256), ``b`` first block or
``c`` [blocks per chunk, [block or -1, …]], ``l`` target, ``d`` [major, minor]; ``same`` instead
of all that is the line number (from 1) of the
first name of the same inode. Bytes are written as the code points of the same number. Readers
refuse a format they do not know.
"""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.errors import ImageError, InfraError

FORMAT = 1
HOLE = -1
MAX_TREE_BYTES = 4 << 30  # of one stored tree, unpacked: ten million entries


class Kind(enum.StrEnum):
    """What an inode is."""

    FILE = "f"
    DIRECTORY = "d"
    SYMLINK = "l"
    CHARACTER = "c"
    BLOCK = "b"
    FIFO = "p"


@dataclass(frozen=True, slots=True)
class Chunks:
    """Content with holes: chunk i of ``span`` blocks lies at block ``at[i]``, or is a HOLE."""

    span: int
    at: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Inode:
    """One file of any kind but directories' children. Two names of one object are hard links.

    ``mode`` are the 12 permission bits; ``content`` is the first 4096-byte block in the data of
    layer number ``layer`` (set when stacked), or chunks. ``sha256`` is as in the stored form.
    """

    kind: Kind
    mode: int
    uid: int
    gid: int
    mtime: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    size: int = 0
    sha256: str = ""
    content: int | Chunks = 0
    target: bytes = b""
    device: tuple[int, int] = (0, 0)
    layer: int = 0


@dataclass(slots=True, eq=False)
class Directory:
    """A folder; ``inode`` is None where only its children were listed (a lower one decides)."""

    inode: Inode | None = None
    opaque: bool = False
    children: dict[bytes, Node] = field(default_factory=dict[bytes, "Node"])


@dataclass(frozen=True, slots=True)
class Whiteout:
    """Hides the lower entry of its name."""


@dataclass(frozen=True, slots=True)
class Link:
    """A hard link to a path that this layer does not hold."""

    target: tuple[bytes, ...]


Node = Directory | Inode | Whiteout | Link
IMPLIED = Inode(Kind.DIRECTORY, 0o755, 0, 0)


def look_up(root: Directory, path: Iterable[bytes]) -> Node | None:
    """The node at ``path``; symlinks are not followed."""
    node: Node | None = root
    for name in path:
        if not isinstance(node, Directory):
            return None
        node = node.children.get(name)
    return node


def stack(lower: Directory, upper: Directory, layer: int) -> Directory:
    """``upper`` over ``lower``, by overlayfs's rules; ``upper``'s inodes become ``layer``'s.

    Raises ImageError (``image_link_broken``) for a hard link to nothing.
    """
    mine: set[int] = set()
    links: list[tuple[Directory, bytes, Link]] = []
    merged = _lay(lower, upper, layer, mine, links)
    for folder, name, link in links:
        target = look_up(merged, link.target) or look_up(lower, link.target)
        if not isinstance(target, Inode):
            where = b"/".join(link.target).decode(errors="replace")
            raise ImageError(
                f"layer {layer + 1} holds a hard link to /{where}, which is not there",
                code="image_link_broken",
            )
        if id(target) not in mine:
            # As overlayfs copies up: other lower names of the file keep the old inode.
            target = replace(target)
            mine.add(id(target))
            parent = look_up(merged, link.target[:-1])
            if isinstance(parent, Directory) and link.target[-1] in parent.children:
                parent.children[link.target[-1]] = target
        folder.children[name] = target
    return merged


def _lay(
    lower: Directory,
    upper: Directory,
    layer: int,
    mine: set[int],
    links: list[tuple[Directory, bytes, Link]],
) -> Directory:
    children = {} if upper.opaque else dict(lower.children)
    merged = Directory(upper.inode or lower.inode, children=children)
    for name, node in upper.children.items():
        match node:
            case Whiteout():
                children.pop(name, None)
            case Directory():
                below = children.get(name)
                below = below if isinstance(below, Directory) else Directory()
                children[name] = _lay(below, node, layer, mine, links)
            case Link():
                links.append((merged, name, node))
            case Inode():
                node.layer = layer
                mine.add(id(node))
                children[name] = node
    return merged


def walk(root: Directory) -> Generator[tuple[tuple[bytes, ...], Node]]:
    """Every node with its path, parents before children, names in byte order; root first."""
    todo: list[tuple[tuple[bytes, ...], Node]] = [((), root)]
    while todo:
        path, node = todo.pop()
        yield path, node
        if isinstance(node, Directory):
            todo += [((*path, name), node.children[name]) for name in sorted(node.children)[::-1]]


def dump(root: Directory, blocks: int) -> bytes:
    """The stored form of a layer's tree; equal trees give equal bytes."""
    lines = [json.dumps({"format": FORMAT, "blocks": blocks})]
    first: dict[int, int] = {}
    for path, node in walk(root):
        line: dict[str, Any] = {"p": _text(b"/".join(path))}
        if isinstance(node, Inode) and id(node) in first:
            line["same"] = first[id(node)]
        else:
            line.update(_written(node))
            first[id(node)] = len(lines)
        lines.append(json.dumps(line, separators=(",", ":")))
    return zlib.compress("\n".join(lines).encode(), 1)


def _written(node: Node) -> dict[str, Any]:
    match node:
        case Whiteout():
            return {"k": "w"}
        case Link():
            return {"k": "h", "l": _text(b"/".join(node.target))}
        case Directory():
            extra = {"o": 1} if node.opaque else {}
            return {"k": "d", **extra, **(_inode(node.inode) if node.inode else {})}
        case Inode():
            return {"k": node.kind.value, **_inode(node), **_content(node)}


def _inode(inode: Inode) -> dict[str, Any]:
    line: dict[str, Any] = {"m": inode.mode, "u": inode.uid, "g": inode.gid, "t": inode.mtime}
    if inode.xattrs:
        line["x"] = [[_text(name), _text(value)] for name, value in inode.xattrs]
    return line


def _content(inode: Inode) -> dict[str, Any]:
    match inode.kind:
        case Kind.FILE:
            line: dict[str, Any] = {"s": inode.size, "h": inode.sha256}
            if isinstance(inode.content, Chunks):
                return {**line, "c": [inode.content.span, inode.content.at]}
            return {**line, "b": inode.content}
        case Kind.SYMLINK:
            return {"l": _text(inode.target)}
        case Kind.CHARACTER | Kind.BLOCK:
            return {"d": inode.device}
        case _:
            return {}


def load(data: bytes) -> tuple[Directory, int]:
    """The tree and its layer's data blocks. Raises InfraError (``layer_damaged``)."""
    try:
        header, *lines = _unpacked(data).decode().split("\n")
        if json.loads(header)["format"] != FORMAT:
            raise ValueError(f"format {header}")
        root = Directory()
        nodes = list[Node]()
        for text in lines:
            line: dict[str, Any] = json.loads(text)
            same: int | None = line.get("same")
            node = _read(line) if same is None else nodes[same - 1]
            nodes.append(node)
            path = _bytes(line["p"]).split(b"/") if line["p"] else []
            if not path:
                assert isinstance(node, Directory)
                root = node
                continue
            parent = look_up(root, path[:-1])
            assert isinstance(parent, Directory)
            parent.children[path[-1]] = node
        return root, json.loads(header)["blocks"]
    except (ValueError, KeyError, TypeError, AssertionError, IndexError, zlib.error) as error:
        raise InfraError(
            "a stored layer cannot be read",
            why=f"its tree is damaged or of another version: {error}",
            fix="remove the image and pull it again",
            code="layer_damaged",
        ) from error


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(data, MAX_TREE_BYTES)
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise ValueError("cut short or too long")
    return text


def _read(line: dict[str, Any]) -> Node:
    kind = line["k"]
    if kind == "w":
        return Whiteout()
    if kind == "h":
        return Link(tuple(_bytes(line["l"]).split(b"/")))
    inode = None
    if "m" in line:
        content: int | Chunks = line.get("b", 0)
        if "c" in line:
            content = Chunks(line["c"][0], tuple(line["c"][1]))
        inode = Inode(
            Kind(kind),
            line["m"],
            line["u"],
            line["g"],
            (line["t"][0], line["t"][1]),
            tuple((_bytes(name), _bytes(value)) for name, value in line.get("x", ())),
            line.get("s", 0),
            line.get("h", ""),
            content,
            _bytes(line.get("l", "")),
            tuple(line.get("d", (0, 0))),
        )
    if kind == "d":
        return Directory(inode, bool(line.get("o")))
    if inode is None:
        raise ValueError(f"{line['p']} has no inode")
    return inode


def _text(data: bytes) -> str:
    return data.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
