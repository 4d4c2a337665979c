"""A layer's way to blocks: ours against `mkfs.erofs --tar` and plain `tar -x`, same tar."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from io import BytesIO
from pathlib import Path

from tests.server import TestServer

from agentenv.host.tools import Tools
from agentenv.layer import erofs, tree
from agentenv.layer.unpack import Unpacker
from benchmarks.machine import heading, row, timed

ROUNDS = 3


def run(_: TestServer) -> None:
    folder = Path(tempfile.mkdtemp(prefix="aenv-bench-convert-", dir="/var/tmp"))
    try:
        tar = _base_tar(folder)
        size = tar.stat().st_size
        heading("way", "seconds", "against mkfs.erofs", "MB/s")
        ways = {
            "mkfs.erofs --tar": lambda: _mkfs(tar, folder),
            "ours: data + tree": lambda: _ours(tar, folder),
            "tar -x": lambda: _extract(tar, folder),
        }
        base = 0.0
        for name, way in ways.items():
            seconds = statistics.median(timed(way, ROUNDS))
            base = base or seconds
            row(name, f"{seconds:.2f}", f"{seconds / base:.2f}", f"{size / seconds / 1e6:.0f}")
        _metadata(folder)
    finally:
        shutil.rmtree(folder)


def _base_tar(folder: Path) -> Path:
    """A Debian root as one tar."""
    tar = folder / "root.tar"
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,procps", "bookworm"]
    subprocess.run([*argv, tar], check=True, stderr=subprocess.DEVNULL)
    return tar


def _mkfs(tar: Path, folder: Path) -> None:
    target = folder / "mkfs.erofs"
    target.unlink(missing_ok=True)
    argv = [Tools.from_environ().find("mkfs.erofs"), "--aufs", "-Enoinline_data", "--tar=f"]
    subprocess.run([*argv, target, tar], check=True, capture_output=True)


def _ours(tar: Path, folder: Path) -> None:
    with (folder / "data").open("wb") as out, tar.open("rb") as blob:
        unpacker = Unpacker(out)
        unpacker.run(blob, lambda: None)
    (folder / "tree").write_bytes(tree.dump(unpacker.root, unpacker.blocks))


def _extract(tar: Path, folder: Path) -> None:
    target = folder / "extracted"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    subprocess.run(["tar", "-C", target, "-xpf", tar], check=True)


def _metadata(folder: Path) -> None:
    stored = (folder / "tree").read_bytes()

    def write() -> None:
        root, blocks = tree.load(stored)
        erofs.write(tree.stack(tree.Directory(), root, 0), [blocks], bytes(16), BytesIO())

    seconds = statistics.median(timed(write, ROUNDS))
    entries = sum(1 for _ in tree.walk(tree.load(stored)[0]))
    print(f"\nmetadata over a stored layer of {entries} entries: {seconds * 1e3:.0f} ms")
