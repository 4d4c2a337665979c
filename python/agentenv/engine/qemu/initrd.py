"""The initrd: the agent as ``/init`` and the kernel modules it loads, as an uncompressed newc cpio.

Uncompressed because the guest would pay for the decompression, and emulated CPUs are slow; the
host's page cache holds one copy for all. Built once per content.

newc (Linux, Documentation/driver-api/early-userspace/buffer-format.rst): per entry a header of
``070701`` and 13 fields of 8 hex digits, the name with NUL, padding to 4, the data, padding to 4.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

MODE_FILE = 0o100755
MODE_DIR = 0o040755
MODE_CHAR = 0o020600


def entry(
    name: str, mode: int, data: bytes, number: int, device: tuple[int, int] = (0, 0)
) -> bytes:
    """One archive member; times and owners are zero so that equal content is equal bytes."""
    raw = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + raw
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def archive(agent: bytes, modules: Iterable[tuple[str, bytes]]) -> bytes:
    """The initrd's bytes; ``modules`` are (file name, content) in load order."""
    loaded = list(modules)
    order = "".join(f"{name}\n" for name, _ in loaded).encode()
    members: list[tuple[str, int, bytes, tuple[int, int]]] = [
        ("dev", MODE_DIR, b"", (0, 0)),
        # The kernel opens it for init's first output, before init can mount devtmpfs.
        ("dev/console", MODE_CHAR, b"", (5, 1)),
        ("modules", MODE_DIR, b"", (0, 0)),
        *((f"modules/{name}", MODE_FILE, data, (0, 0)) for name, data in loaded),
        ("modules.load", MODE_FILE, order, (0, 0)),
        ("init", MODE_FILE, agent, (0, 0)),
        ("TRAILER!!!", 0, b"", (0, 0)),
    ]
    return b"".join(
        entry(name, mode, data, number, device)
        for number, (name, mode, data, device) in enumerate(members, 1)
    )


def ensure(folder: Path, agent: Path, modules: Sequence[Path]) -> Path:
    """The initrd for this agent and these modules, made if it is not there. Blocking."""
    loaded = [(module.name, module.read_bytes()) for module in modules]
    data = archive(agent.read_bytes(), loaded)
    path = folder / f"initrd-{hashlib.blake2s(data, digest_size=8).hexdigest()}"
    if not path.exists():
        fresh = folder / f".{path.name}.{os.getpid()}"
        fresh.write_bytes(data)
        fresh.chmod(0o444)
        fresh.rename(path)
    return path
