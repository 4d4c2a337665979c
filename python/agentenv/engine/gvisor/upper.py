"""The writable part of a sandbox's root: a sparse ext4 file, whose size is the sandbox's limit.

gVisor keeps what a guest writes in one file in a folder of the host and has no limit of its own:
the folder is the root of this file system. The guest gets ENOSPC, and freed space is given back. It
is gone with its sandbox (what is saved is saved by the engine), so it has no journal.
"""

from __future__ import annotations

from pathlib import Path

from agentenv.errors import faults
from agentenv.host.process import run

DEADLINE = 60.0  # seconds
# The store's own file and what ext4 keeps of small disks.
LEAST_MIB = 16


async def make(path: Path, size_mib: int) -> None:
    """A fresh file system at ``path``: 10 ms whatever the size, of which 4 MB are written.

    Raises InfraError, ProcessFailed.
    """
    with faults(f"the sandbox's disk {path.name} could not be made"):
        path.touch(mode=0o600)
    words = ("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal")
    options = ("-E", "lazy_itable_init=1,nodiscard")
    size = f"{max(size_mib, LEAST_MIB)}M"
    await run((*words, *options, str(path), size), timeout=DEADLINE)
