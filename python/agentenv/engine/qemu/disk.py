"""The writable disk of a sandbox: a thin qcow2 over a blank ext4 that all of one size share.

The blank file system and an empty overlay over it are made once per size; a sandbox gets a copy
of that overlay (some 200 KB): less than a millisecond, where ``qemu-img create`` takes 13-32.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from agentenv.concurrency import KeyedLocks
from agentenv.errors import faults
from agentenv.host.process import run

# Fixed identifiers: blanks of one size are the same bytes on every node.
FS_UUID = "a9e47e5e-0000-4000-8000-000000000001"
HASH_SEED = "a9e47e5e-0000-4000-8000-000000000002"
SMALL_JOURNAL_MIB = 16  # a sandbox's disk is not shared and rarely synced
_LOCKS = KeyedLocks()


async def ensure_blank(folder: Path, size_mib: int) -> Path:
    """The empty overlay for disks of this size, made if it is not there."""
    overlay = folder / f"blank-{size_mib}.qcow2"
    async with _LOCKS.hold(str(overlay)):
        if not overlay.exists():
            await _make_blank(folder, overlay, size_mib)
    return overlay


async def _make_blank(folder: Path, overlay: Path, size_mib: int) -> None:
    raw = folder / f"blank-{size_mib}.raw"
    fresh = folder / f".{raw.name}.{os.getpid()}"
    fresh_overlay = folder / f".{overlay.name}.{os.getpid()}"
    try:
        with faults("a blank disk could not be made"), fresh.open("wb") as file:
            file.truncate(size_mib << 20)
        await run(
            (
                "mkfs.ext4", "-q", "-F", "-m", "0", "-U", FS_UUID,
                "-J", f"size={SMALL_JOURNAL_MIB if size_mib >= 512 else 4}",
                "-E", f"lazy_itable_init=1,lazy_journal_init=1,hash_seed={HASH_SEED}",
                "-O", "^has_journal" if size_mib < 64 else "has_journal",
                str(fresh),
            ),
            env={**os.environ, "E2FSPROGS_FAKE_TIME": "1"},
        )  # fmt: skip
        fresh.chmod(0o444)
        fresh.rename(raw)
        await run(
            (
                "qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(raw),
                "-o", "lazy_refcounts=on,extended_l2=off", str(fresh_overlay), f"{size_mib}M",
            )
        )  # fmt: skip
        fresh_overlay.rename(overlay)
    finally:
        fresh.unlink(missing_ok=True)
        fresh_overlay.unlink(missing_ok=True)


async def make(folder: Path, path: Path, size_mib: int, uid: int) -> None:
    """A fresh disk at ``path`` owned by ``uid``. Blanks lie in ``folder``."""
    blank = await ensure_blank(folder, size_mib)

    def copy() -> None:
        with faults(f"the sandbox's disk {path.name} could not be made"):
            shutil.copyfile(blank, path)
            path.chmod(0o600)
            os.chown(path, uid, uid)

    await asyncio.to_thread(copy)
