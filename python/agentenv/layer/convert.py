"""One layer, once: from the blob of an image's source to a tree and a block layer in the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agentenv.concurrency import interruptible
from agentenv.errors import ImageError, faults
from agentenv.image.compression import Readable
from agentenv.layer import erofs, tree
from agentenv.layer.layers import BY_CONTENT, Interrupted, Layers, Part, named
from agentenv.layer.tree import Directory
from agentenv.layer.unpack import Unpacker
from agentenv.store.lease import Lease

# Part of every name: what another writer makes is something else.
WRITER = 1


def layer_name(diff_id: str) -> str:
    """What the store calls an image's layer: its tree, and the source of its block layer."""
    return named(f"layer {WRITER} {diff_id}")


def meta_name(diff_ids: tuple[str, ...]) -> str:
    """The source of the metadata of an image with these layers."""
    return named(f"meta {WRITER} {tree.FORMAT} " + " ".join(diff_ids))


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts what a conversion has read, for progress; ``advance`` is called from its thread."""

    blob: Readable
    advance: Callable[[int], None]

    def read(self, size: int, /) -> bytes:
        chunk = self.blob.read(size)
        self.advance(len(chunk))
        return chunk


async def convert(
    layers: Layers,
    diff_id: str,
    open_blob: Callable[[], BinaryIO],
    advance: Callable[[int], None],
    lease: Lease,
) -> Part:
    """Store the layer with this diff id, read from ``open_blob()``.

    Raises ImageError for a layer that is damaged, hostile or not the one it should be,
    InfraError (``disk_full``, ``store_unavailable``).
    """
    name = layer_name(diff_id)
    async with layers.drafts.draft() as data:

        def work(stop: threading.Event) -> tuple[bytes, int]:
            return _unpack(data.path, diff_id, open_blob, advance, stop)

        listing, blocks = await interruptible(work)
        spans = [(0, blocks, 0)] if blocks else []
        part = await layers.write(data.path, spans, blocks, BY_CONTENT, lease)
        await lease.use([f"tree/{name}"])
        await layers.objects.put(f"tree/{name}", listing)
        await layers.put_source(name, part, lease)  # last: its presence says that all is there
        await layers.keep_here(part, data.path)
    return part


def _unpack(
    data: Path,
    diff_id: str,
    open_blob: Callable[[], BinaryIO],
    advance: Callable[[int], None],
    stop: threading.Event,
) -> tuple[bytes, int]:
    with faults("the layer could not be stored"):
        unpacker, found = unpack(data, open_blob, advance, stop)
        if found != diff_id:
            raise ImageError(
                "the layer is not the one the image names",
                why=f"its content has the digest {found}, not {diff_id}",
                code="digest_mismatch",
            )
        return tree.dump(unpacker.root, unpacker.blocks), unpacker.blocks


def unpack(
    data: Path,
    open_blob: Callable[[], BinaryIO],
    advance: Callable[[int], None],
    stop: threading.Event,
) -> tuple[Unpacker, str]:
    """Unpack a layer's blob, its contents into ``data``; with its diff id. Blocking.

    Raises ImageError, OSError, Interrupted when ``stop`` was set.
    """

    def check() -> None:
        if stop.is_set():
            raise Interrupted

    with data.open("wb", buffering=1 << 20) as out, open_blob() as blob:
        unpacker = Unpacker(out)
        return unpacker, unpacker.run(Reading(blob, advance), check)


async def load_tree(layers: Layers, diff_ids: tuple[str, ...]) -> tuple[Directory, list[int]]:
    """The image's tree, stacked from its stored layers, and each layer's data blocks."""

    def stacked(trees: list[bytes]) -> tuple[Directory, list[int]]:
        root, sizes = Directory(), list[int]()
        for number, data in enumerate(trees):
            upper, blocks = tree.load(data)
            root = tree.stack(root, upper, number)
            sizes.append(blocks)
        return root, sizes

    trees = [await layers.tree(layer_name(diff_id)) for diff_id in diff_ids]
    return await interruptible(lambda _: stacked(trees))


async def write_metadata(layers: Layers, diff_ids: tuple[str, ...], lease: Lease) -> Part:
    """Store the metadata of the image with these layers, which are stored."""
    root, sizes = await load_tree(layers, diff_ids)
    name = meta_name(diff_ids)
    uuid = bytes.fromhex(name)[:16]
    async with layers.drafts.draft() as draft:

        def work(_: threading.Event) -> int:
            with faults("the image's metadata could not be stored"), draft.path.open("wb") as out:
                return erofs.write(root, sizes, uuid, out)

        blocks = await interruptible(work)
        part = await layers.write(draft.path, [(0, blocks, 0)], blocks, BY_CONTENT, lease)
        await layers.put_source(name, part, lease)
        await layers.keep_here(part, draft.path)
    return part
