"""One layer, once: from the blob of an image's source to a tree and a data blob in the store."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agentenv.concurrency import interruptible
from agentenv.errors import ImageError, faults
from agentenv.image.compression import Readable
from agentenv.layer import erofs, tree
from agentenv.layer.tree import Directory
from agentenv.layer.unpack import Unpacker
from agentenv.store.blobs import Blobs

DATA, TREE, META = "data", "tree", "meta"
# Part of every key: bytes of another writer are other blobs.
WRITER = 1


class Interrupted(Exception):
    """Ends the conversion's thread when its task was cancelled."""


def layer_keys(diff_id: str) -> tuple[str, str]:
    """The keys of a layer's tree and data blobs."""
    name = _digest(f"layer {WRITER} {diff_id}")
    return f"{TREE}/{name}", f"{DATA}/{name}"


def meta_key(diff_ids: tuple[str, ...]) -> str:
    """The key of the metadata of an image with these layers."""
    return f"{META}/{_digest(f'meta {WRITER} {tree.FORMAT} ' + ' '.join(diff_ids))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
    blobs: Blobs, diff_id: str, open_blob: Callable[[], BinaryIO], advance: Callable[[int], None]
) -> None:
    """Store the layer with this diff id, read from ``open_blob()``.

    Raises ImageError for a layer that is damaged, hostile or not the one it should be,
    InfraError (``disk_full``); on any of them, and on cancellation, nothing is stored.
    """
    tree_key, data_key = layer_keys(diff_id)
    async with AsyncExitStack() as drafts:
        data = await drafts.enter_async_context(blobs.draft())
        listing = await drafts.enter_async_context(blobs.draft())

        def work(stop: threading.Event) -> None:
            _unpack(data.path, listing.path, diff_id, open_blob, advance, stop)

        await interruptible(work)
        await data.commit(data_key)
        await listing.commit(tree_key)  # last: its presence says that the layer is whole


def _unpack(
    data: Path,
    listing: Path,
    diff_id: str,
    open_blob: Callable[[], BinaryIO],
    advance: Callable[[int], None],
    stop: threading.Event,
) -> None:
    with faults("the layer could not be stored"):
        unpacker, found = unpack(data, open_blob, advance, stop)
        if found != diff_id:
            raise ImageError(
                "the layer is not the one the image names",
                why=f"its content has the digest {found}, not {diff_id}",
                code="digest_mismatch",
            )
        listing.write_bytes(tree.dump(unpacker.root, unpacker.blocks))


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


async def load_tree(blobs: Blobs, diff_ids: tuple[str, ...]) -> tuple[Directory, list[int]]:
    """The image's tree, stacked from its stored layers, and each layer's data blocks."""

    def stacked(paths: list[Path]) -> tuple[Directory, list[int]]:
        root, sizes = Directory(), list[int]()
        for number, path in enumerate(paths):
            upper, blocks = tree.load(path.read_bytes())
            root = tree.stack(root, upper, number)
            sizes.append(blocks)
        return root, sizes

    paths = [await stored(blobs, layer_keys(diff_id)[0]) for diff_id in diff_ids]
    return await interruptible(lambda _: stacked(paths))


async def stored(blobs: Blobs, key: str) -> Path:
    """The path of a blob that must be there. Raises ImageError (``image_incomplete``)."""
    path = await blobs.path(key)
    if path is None:
        raise ImageError(
            "a part of the image is missing from the store",
            why=f"no blob {key}",
            fix="pull it again",
            code="image_incomplete",
        )
    return path


async def write_metadata(blobs: Blobs, diff_ids: tuple[str, ...]) -> None:
    """Store the metadata of the image with these layers, which are stored."""
    root, sizes = await load_tree(blobs, diff_ids)
    key = meta_key(diff_ids)
    uuid = bytes.fromhex(key.split("/")[1])[:16]
    async with blobs.draft() as draft:

        def work(_: threading.Event) -> None:
            with faults("the image's metadata could not be stored"), draft.path.open("wb") as out:
                erofs.write(root, sizes, uuid, out)

        await interruptible(work)
        await draft.commit(key)


async def segments(blobs: Blobs, diff_ids: tuple[str, ...]) -> tuple[Path, ...]:
    """The files that make up the flat image: metadata, then each layer's data (none empty)."""
    paths = [await stored(blobs, meta_key(diff_ids))]
    paths += [await stored(blobs, layer_keys(diff_id)[1]) for diff_id in diff_ids]
    return tuple(path for path in paths if path.stat().st_size)
