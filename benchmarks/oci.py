"""OCI layouts of layers that are given as tars."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_Descriptor = dict[str, str | int]


def layout(folder: Path, tars: Sequence[Path], *, gzip: bool = False) -> int:
    """Lay an image of these layers at ``folder``; bytes of its layers as they lie there."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    layers, diff_ids = list[_Descriptor](), list[str]()
    for tar in tars:
        diff_ids.append(f"sha256:{_digest(tar)}")
        layers.append(_packed(blobs, tar) if gzip else _plain(blobs, tar))
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}
    about = _put(blobs, json.dumps(config).encode()) | {"mediaType": CONFIG}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": about, "layers": layers}
    found = _put(blobs, json.dumps(manifest).encode()) | {"mediaType": MANIFEST}
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [found]}))
    return sum(int(layer["size"]) for layer in layers)


def _put(blobs: Path, data: bytes) -> _Descriptor:
    name = hashlib.sha256(data).hexdigest()
    (blobs / name).write_bytes(data)
    return {"digest": f"sha256:{name}", "size": len(data)}


def _plain(blobs: Path, tar: Path) -> _Descriptor:
    shutil.copyfile(tar, blobs / _digest(tar))
    size = tar.stat().st_size
    return {"mediaType": LAYER, "digest": f"sha256:{_digest(tar)}", "size": size}


def _packed(blobs: Path, tar: Path) -> _Descriptor:
    packed = subprocess.check_output(["pigz" if shutil.which("pigz") else "gzip", "-c", tar])
    return _put(blobs, packed) | {"mediaType": LAYER + "+gzip"}


def _digest(tar: Path) -> str:
    with tar.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
