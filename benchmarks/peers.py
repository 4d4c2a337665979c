"""What others are measured with: a root of busybox, and images for docker."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "aenv-bench"


def busybox(root: Path) -> None:
    (root / "bin").mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for name in ("true", "sleep", "sh"):
        os.symlink("busybox", root / "bin" / name)


@contextmanager
def docker_image(tar: Path | None = None) -> Iterator[str]:
    """A name for the root in ``tar``, else for busybox's, if an engine answers; else nothing."""
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        yield ""
        return
    folder = Path(tempfile.mkdtemp(prefix="aenv-bench-docker-", dir="/var/tmp"))
    try:
        if tar is None:
            busybox(folder / "root")
            tar = folder / "root.tar"
            subprocess.run(["tar", "-C", folder / "root", "-cf", tar, "."], check=True)
        argv = ["docker", "import", tar, IMAGE]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        yield IMAGE
    finally:
        subprocess.run(["docker", "rmi", "-f", IMAGE], capture_output=True)
        shutil.rmtree(folder)
