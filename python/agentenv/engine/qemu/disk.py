"""The writable disk of a sandbox: a thin qcow2 over a blank ext4 that all of one size share.

The blank lies in the block store; an empty overlay is made once per size, and a sandbox gets a
copy of it (some 200 KB): less than a millisecond, where ``qemu-img create`` takes 13-32. Overlays
name no backing file: the machine is told what lies below.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from pathlib import Path

from agentenv.concurrency import KeyedLocks
from agentenv.errors import InfraError, faults
from agentenv.host.process import run

# Fixed identifiers: blanks of one size are the same bytes on every node.
FS_UUID = "a9e47e5e-0000-4000-8000-000000000001"
HASH_SEED = "a9e47e5e-0000-4000-8000-000000000002"
SMALL_JOURNAL_MIB = 16  # a sandbox's disk is not shared and rarely synced
BLOCK = 4096
_LOCKS = KeyedLocks()

Span = tuple[int, int, int | None]
"""First block of the disk, blocks, byte offset in the file that holds them; None for zeroes."""


async def make_blank(path: Path, size_mib: int) -> None:
    """A blank file system of this size in the file at ``path``, sparse."""
    with faults("a blank disk could not be made"):
        os.truncate(path, size_mib << 20)
    await run(
        (
            "mkfs.ext4", "-q", "-F", "-m", "0", "-U", FS_UUID,
            "-J", f"size={SMALL_JOURNAL_MIB if size_mib >= 512 else 4}",
            "-E", f"lazy_itable_init=1,lazy_journal_init=1,hash_seed={HASH_SEED}",
            "-O", "^has_journal" if size_mib < 64 else "has_journal",
            str(path),
        ),
        env={**os.environ, "E2FSPROGS_FAKE_TIME": "1"},
    )  # fmt: skip


def data_spans(path: Path) -> list[Span]:
    """Where a sparse file has data, in whole blocks."""
    spans: list[Span] = []
    with faults(f"{path.name} could not be read"), path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        at = 0
        while at < end:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            stop = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            first, last = at // BLOCK, -(-stop // BLOCK)
            spans.append((first, last - first, first * BLOCK))
            at = stop
    return spans


async def written_spans(path: Path) -> list[Span]:
    """What a sandbox wrote to its disk: the clusters of a qcow2 that nobody writes now.

    What it discarded is zeroes, and hides what lies below. Raises ProcessFailed, InfraError.
    """
    words = ("qemu-img", "map", "--output=json", "-f", "qcow2", str(path))
    spans: list[Span] = []
    for part in json.loads((await run(words)).stdout):
        if not part["present"]:
            continue
        offset = None if part["zero"] else part.get("offset")
        whole = part["start"] % BLOCK == 0 and part["length"] % BLOCK == 0
        if not whole or (offset is None and not part["zero"]):
            raise InfraError(f"{path.name} holds clusters in an unknown way", code="disk_format")
        spans.append((part["start"] // BLOCK, part["length"] // BLOCK, offset))
    return spans


async def ensure_overlay(folder: Path, size_mib: int) -> Path:
    """The empty overlay for disks of this size, made if it is not there."""
    overlay = folder / f"empty-{size_mib}.qcow2"
    async with _LOCKS.hold(str(overlay)):
        if not overlay.exists():
            fresh = folder / f".{overlay.name}.{os.getpid()}"
            try:
                options = "lazy_refcounts=on,extended_l2=off"
                words = ("qemu-img", "create", "-q", "-f", "qcow2", "-o", options)
                await run((*words, str(fresh), f"{size_mib}M"))
                fresh.rename(overlay)
            finally:
                fresh.unlink(missing_ok=True)
    return overlay


async def make(folder: Path, path: Path, size_mib: int, uid: int) -> None:
    """A fresh disk at ``path`` owned by ``uid``. Empty overlays lie in ``folder``."""
    empty = await ensure_overlay(folder, size_mib)

    def copy() -> None:
        with faults(f"the sandbox's disk {path.name} could not be made"):
            shutil.copyfile(empty, path)
            path.chmod(0o600)
            os.chown(path, uid, uid)

    await asyncio.to_thread(copy)
