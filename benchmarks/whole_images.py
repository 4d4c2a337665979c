"""An image taken whole through a slow link, as it is done without a block store."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.image import registries

from benchmarks import oci
from benchmarks.link import link


@dataclass(frozen=True)
class Whole:
    """``unpacked``: its end is a folder of files, not an image to mount."""

    name: str
    bytes: int
    unpacked: bool
    port: int
    work: Callable[[int], None]

    def take(self, round_trip: float, rate: float) -> float:
        """Seconds; it comes through such a link."""
        with link(self.port, round_trip=round_trip, rate=rate) as port:
            begun = time.perf_counter()
            self.work(port)
            return time.perf_counter() - begun


@contextmanager
def whole_images(tar: Path, flat: Path, folder: Path) -> Iterator[list[Whole]]:
    """Ways to have the image in ``tar``, whose EROFS image is ``flat``."""
    files, target = folder / "files", folder / "target"
    files.mkdir()
    _run("zstd", "-q", "-3", tar, "-o", files / "layer.tar.zst")
    squashed = folder / "unpacked"
    squashed.mkdir()
    _run("tar", "-C", squashed, "-xpf", tar)
    words = ("-comp", "zstd", "-Xcompression-level", "3", "-quiet", "-no-progress")
    _run("mksquashfs", squashed, files / "image.squashfs", *words)
    shutil.rmtree(squashed)
    (files / "image.erofs").hardlink_to(flat)
    layout = folder / "layout"
    packed = oci.layout(layout, [tar], gzip=True)
    with _served(files) as port, registries.real(folder / "registry") as registry:
        registry.push(layout, "x")
        yield [
            Whole(
                "skopeo copy, umoci unpack (gzip)", packed, True, int(registry.host.split(":")[1]),
                lambda port: _pull(port, target),
            ),
            Whole(
                "curl | zstd -d | tar -x (zstd)", (files / "layer.tar.zst").stat().st_size, True,
                port, lambda port: _stream(port, target),
            ),
            *(
                Whole(
                    f"curl of the {kind} image, mount", (files / name).stat().st_size, False, port,
                    lambda port, name=name, kind=kind: _mount(port, name, kind, target),
                )
                for name, kind in (("image.squashfs", "squashfs"), ("image.erofs", "erofs"))
            ),
        ]  # fmt: skip


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def _served(folder: Path) -> Iterator[int]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, format: str, *args) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _pull(port: int, target: Path) -> None:
    with _fresh(target):
        source = f"docker://127.0.0.1:{port}/x:latest"
        _run("skopeo", "copy", "--quiet", "--src-tls-verify=false", source, f"oci:{target}/i:x")
        _run("umoci", "unpack", "--image", f"{target}/i:x", target / "bundle")


def _stream(port: int, target: Path) -> None:
    with _fresh(target):
        pipe = f"curl -sSf http://127.0.0.1:{port}/layer.tar.zst | zstd -dc | tar -C {target} -xp"
        _run("bash", "-o", "pipefail", "-c", pipe)


def _mount(port: int, name: str, kind: str, target: Path) -> None:
    with _fresh(target):
        _run("curl", "-sSf", "-o", target / name, f"http://127.0.0.1:{port}/{name}")
        root = target / "root"
        root.mkdir()
        _run("mount", "-t", kind, "-o", "ro,loop", target / name, root)
        _run("umount", root)


@contextmanager
def _fresh(target: Path) -> Iterator[None]:
    target.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(target)
