"""Images full of what goes wrong in the wild, and what they should look like unpacked.

``write`` makes an OCI layout. ``reference`` unpacks the same layers with GNU tar and lets the
kernel's overlayfs stack them; ``facts`` tells all that is to be equal of two trees.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import stat
import subprocess
import tarfile
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service+ep
LONG_NAME = "n" * 255
LONG_PATH = "/".join(["deep" * 20] * 6)


@dataclass
class Layer:
    """A tar in the making; ``packed`` is gzip, zstd or plain."""

    packed: str = "gzip"
    format: int = tarfile.PAX_FORMAT
    raw: bytes | None = None
    _entries: list = field(default_factory=list)

    def add(self, name, kind=tarfile.REGTYPE, *, data=b"", link="", mode=None, owner=(0, 0),
            device=(0, 0), mtime=1_600_000_000, xattrs=None, headers=None):  # fmt: skip
        member = tarfile.TarInfo(os.fsdecode(name) if isinstance(name, bytes) else name)
        member.type, member.linkname = kind, link
        member.mode = mode if mode is not None else (0o755 if kind == tarfile.DIRTYPE else 0o644)
        member.uid, member.gid = owner
        member.devmajor, member.devminor = device
        member.mtime, member.size = mtime, len(data)
        member.pax_headers = {
            **{f"SCHILY.xattr.{k}": os.fsdecode(v) for k, v in (xattrs or {}).items()},
            **(headers or {}),
        }
        self._entries.append((member, data))
        return self

    def folder(self, name, mode=0o755, **more):
        return self.add(name, tarfile.DIRTYPE, mode=mode, **more)

    def symlink(self, name, target, **more):
        return self.add(name, tarfile.SYMTYPE, link=target, mode=0o777, **more)

    def hardlink(self, name, target, **more):
        return self.add(name, tarfile.LNKTYPE, link=target, **more)

    def tar(self) -> bytes:
        if self.raw is not None:
            return self.raw
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=self.format, errors="surrogateescape") as t:
            for member, data in self._entries:
                t.addfile(member, io.BytesIO(data))
        return out.getvalue()

    def blob(self) -> bytes:
        plain = self.tar()
        match self.packed:
            case "gzip":
                return gzip.compress(plain, 1, mtime=0)
            case "zstd":
                return zstandard.compress(plain)
            case _:
                return plain


def noise(size: int, seed: int = 7) -> bytes:
    return random.Random(seed).randbytes(size)


def base_layer() -> Layer:
    layer = Layer("gzip")
    layer.folder("./", 0o755)
    for name, mode in (("etc", 0o755), ("var", 0o711), ("usr", 0o755), ("usr/lib", 0o755),
                       ("tmp", 0o1777), ("opaque", 0o750), ("opaque/sub", 0o755),
                       ("removed", 0o755), ("dev", 0o755), ("recreated", 0o700),
                       ("becomes-file", 0o755), ("only-mode", 0o755)):  # fmt: skip
        layer.folder(name, mode, owner=(3, 4) if name == "var" else (0, 0))
    layer.symlink("lib", "usr/lib").symlink("absolute", "/etc/passwd").symlink("loop", "loop")
    layer.symlink("far", "x/" * 1500 + "y")
    layer.add("etc/passwd", data=b"root:x:0:0::/:/bin/sh\n").add("gone", data=b"gone")
    layer.add("usr/lib/libc", data=noise(70_000)).add("becomes-folder", data=b"a file")
    layer.add("su", data=b"suid", mode=0o4755).add("sgid", data=b"x", mode=0o2711, owner=(0, 42))
    layer.add("cap", data=b"cap", mode=0o755, xattrs={"security.capability": CAPABILITY})
    layer.add("attrs", data=b"a", xattrs={"user.note": b"caf\xc3\xa9 \xff\x00z", "user.empty": b"",
                                          "user.long": noise(900).replace(b"\n", b"")})  # fmt: skip
    layer.add("dev/null", tarfile.CHRTYPE, device=(1, 3), mode=0o666)
    layer.add("dev/high", tarfile.CHRTYPE, device=(300, 70_000))
    layer.add("dev/loop", tarfile.BLKTYPE, device=(7, 200), mode=0o660, owner=(0, 6))
    layer.add("fifo", tarfile.FIFOTYPE, mode=0o600)
    layer.add("a1", data=b"linked" * 1000).hardlink("a2", "a1").hardlink("opaque/a3", "./a2")
    layer.hardlink("lib-link", "lib").symlink("twice-linked", "t").hardlink("tl2", "twice-linked")
    layer.add("opaque/hidden", data=b"h").add("opaque/sub/x", data=b"x")
    layer.add("removed/f", data=b"f").add("recreated/old", data=b"old")
    layer.add("becomes-file/inner", data=b"i").add("only-mode/stays", data=b"s")
    layer.add(LONG_NAME, data=b"long").add(b"caf\xe9\xff \n\t", data=b"not utf-8")
    layer.add(LONG_PATH, data=b"deep", headers={})
    for size in (0, 1, 4095, 4096, 4097):
        layer.add(f"size-{size}", data=noise(size))
    layer.add("big", data=noise(1_500_000)).add("same-as-big", data=noise(1_500_000))
    layer.add("holes", data=noise(5000) + bytes(3 << 20) + noise(70_000, 9) + bytes(1 << 20))
    layer.add("all-zero", data=bytes(2 << 20)).add(
        "owner", data=b"o", owner=(4_000_000_000, 99_999)
    )
    layer.add("time", data=b"t", headers={"mtime": "1234567890.123456789"})
    for number in range(300):  # directories of several blocks
        layer.add(f"many/{'e' * 60}-{number}", data=str(number).encode())
    return layer


def change_layer() -> Layer:
    layer = Layer("zstd")
    layer.add(".wh.gone").hardlink(".wh.removed", ".wh..wh.plnk/12.345")
    layer.add("opaque/.wh..wh..opq").add("opaque/new", data=b"new")
    layer.add("var/implied/file", data=b"its parents are not listed")
    layer.folder("only-mode", 0o500, owner=(7, 7), mtime=1_700_000_000)
    layer.add("lib/in-layer", data=b"a folder hides the symlink")
    layer.hardlink("b1", "a1").hardlink("var/b2", "a1")
    layer.add("becomes-file", data=b"was a folder").folder("becomes-folder")
    layer.add("becomes-folder/inner", data=b"i")
    layer.folder("recreated", 0o711).add(".wh.recreated").add("recreated/new", data=b"n")
    layer.add("twice", data=b"first").add("twice", data=b"second", mode=0o600)
    layer.folder("merged").add("merged/one", data=b"1").folder("merged", 0o700)
    layer.add("etc/passwd", data=b"changed")
    layer.symlink("here", "etc").add("here/through", data=b"through a symlink of this layer")
    layer.add("usr/lib/.wh.libc").add(".wh.never-was")
    return layer


def empty_layer() -> Layer:
    return Layer("plain")


def link_layer() -> Layer:
    """Links over two layers, old formats, absolute paths."""
    layer = Layer("plain", tarfile.GNU_FORMAT)
    layer.hardlink("c1", "/b1").hardlink("c2", "twice").add("/absolute-path", data=b"relative")
    layer.add("g" * 180 + "/" + "h" * 120, data=b"gnu long name").symlink("gl", "t" * 300)
    layer.add("big", data=noise(1_500_000, 11), mode=0o700)
    return layer


def sparse_layer(folder: Path, size: int = 9 << 30) -> Layer:
    """Made by GNU tar: sparse files in its three PAX forms' newest, and over 8 GiB."""
    tree = folder / "sparse"
    tree.mkdir()
    with (tree / "large").open("wb") as file:
        file.write(noise(10_000))
        file.seek(size // 2)
        file.write(noise(70_000, 3))
        file.truncate(size + 123)
    with (tree / "small-sparse").open("wb") as file:
        file.seek(300_000)
        file.write(b"end")
    (tree / "dense").write_bytes(noise(100_000, 5))
    for path in (*tree.iterdir(), tree):
        os.utime(path, (1_500_000_000, 1_500_000_000))
    argv = ["tar", "-C", folder, "--format=pax", "--sparse", "--numeric-owner", "--sort=name",
            "-cf", "-", "sparse"]  # fmt: skip
    made = subprocess.run(argv, check=True, capture_output=True).stdout
    return Layer("gzip", raw=made)


def write(layout: Path, layers: list[Layer], config: dict | None = None, *, tag="latest",
          architecture="amd64") -> str:  # fmt: skip
    """An OCI layout with one image; its manifest's digest."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    kinds = {"gzip": "+gzip", "zstd": "+zstd", "plain": ""}
    described = [
        {"mediaType": f"application/vnd.oci.image.layer.v1.tar{kinds[layer.packed]}",
         **put(layer.blob())} for layer in layers
    ]  # fmt: skip
    diff_ids = ["sha256:" + hashlib.sha256(layer.tar()).hexdigest() for layer in layers]
    doc = {"architecture": architecture, "os": "linux", "config": config or {},
           "rootfs": {"type": "layers", "diff_ids": diff_ids}}  # fmt: skip
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json",
                   **put(json.dumps(doc).encode())},
        "layers": described,
    }  # fmt: skip
    entry = {
        "mediaType": manifest["mediaType"],
        **put(json.dumps(manifest).encode()),
        "annotations": {"org.opencontainers.image.ref.name": tag},
    }
    index = layout / "index.json"
    known = json.loads(index.read_text())["manifests"] if index.exists() else []
    index.write_text(json.dumps({"schemaVersion": 2, "manifests": [*known, entry]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return entry["digest"]


@contextmanager
def reference(folder: Path, layers: list[Layer]):
    """The image as GNU tar and overlayfs make it; yields where it is mounted."""
    folder.mkdir()
    done: list[Path] = []
    for number, layer in enumerate(layers):
        target = folder / f"l{number}"
        target.mkdir()
        with overlay(folder, done) as lower:
            _extract(layer.tar(), target, lower)
        done.append(target)
    with overlay(folder, done) as merged:
        yield merged


@contextmanager
def overlay(folder: Path, layers: list[Path]):
    """Layers, the last on top, mounted read-only; None if there are none."""
    if not layers:
        yield None
        return
    empty, where = folder / "empty", folder / "merged"
    empty.mkdir(exist_ok=True)
    where.mkdir(exist_ok=True)
    stacked = ":".join(str(path) for path in [*layers[::-1], empty])
    subprocess.run(["mount", "-t", "overlay", "-o", f"ro,lowerdir={stacked}", "aenv-test", where],
                   check=True)  # fmt: skip
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


def _extract(tar: bytes, target: Path, lower: Path | None) -> None:
    """One layer into a folder of its own, whiteouts in overlayfs's form."""
    with tarfile.open(fileobj=io.BytesIO(tar), errors="surrogateescape") as archive:
        members = archive.getmembers()
    listed = {os.path.normpath(m.name).lstrip("/") for m in members}
    for member in members:
        if member.islnk() and ".wh." not in member.name:
            name = os.path.normpath(member.linkname).lstrip("/")
            if name not in listed and lower is not None and not os.path.lexists(target / name):
                # What overlayfs does when a lower file is linked: it is copied up first.
                subprocess.run(["cp", "-a", "--parents", name, target], cwd=lower, check=True)
    argv = [
        "tar",
        "-C",
        target,
        "-xpf",
        "-",
        "--xattrs",
        "--xattrs-include=*",
        "--numeric-owner",
        "--same-owner",
        "--exclude=.wh.*",
    ]
    done = subprocess.run(argv, input=tar, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    whiteouts = [m for m in members if Path(m.name).name.startswith(".wh.")]
    for member in whiteouts:
        parent, name = (target / member.name).parent, Path(member.name).name
        parent.mkdir(parents=True, exist_ok=True)
        if name == ".wh..wh..opq":
            os.setxattr(parent, "trusted.overlay.opaque", b"y")
        elif not name.startswith(".wh..wh."):
            hidden = parent / name.removeprefix(".wh.")
            if hidden.is_dir() and not hidden.is_symlink():
                os.setxattr(hidden, "trusted.overlay.opaque", b"y")
            elif not os.path.lexists(hidden):
                os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0))
    for current, _, _ in os.walk(target, topdown=False):
        path = Path(current)
        name = os.path.relpath(current, target)
        entries = [m for m in members if os.path.normpath(m.name) == name and m.isdir()]
        if entries:
            when = float(entries[-1].pax_headers.get("mtime", entries[-1].mtime))
            os.utime(path, (when, when))
        elif lower is not None and (lower / name).is_dir() and not (lower / name).is_symlink():
            for tool in ("chown", "chmod", "touch"):
                subprocess.run([tool, f"--reference={lower / name}", path], check=True)
        else:
            path.chmod(0o755)
            os.chown(path, 0, 0)
            os.utime(path, (0, 0))


WINDOW = 4 << 20


def content_digest(path: bytes, size: int) -> str:
    """Of the whole file; of one that is mostly a hole, its beginning, middle and end."""
    with open(path, "rb") as file:
        if size <= 1 << 30:
            return hashlib.file_digest(file, "sha256").hexdigest()
        hasher = hashlib.sha256()
        for offset in (0, size // 2 - WINDOW // 2, size - WINDOW):
            file.seek(offset)
            hasher.update(file.read(WINDOW))
        return hasher.hexdigest()


def facts(root: Path) -> dict[bytes, dict]:
    """All of a tree that must be equal, by path."""
    found: dict[bytes, dict] = {}
    groups = defaultdict(list)
    top = os.fsencode(root)
    for current, folders, files in os.walk(top):
        for name in [b"", *folders, *files] if current == top else [*folders, *files]:
            path = os.path.join(current, name) if name else current
            info = os.lstat(path)
            key = os.path.relpath(path, top)
            fact = {
                "mode": oct(info.st_mode),
                "owner": (info.st_uid, info.st_gid),
                "mtime": info.st_mtime_ns,
                "xattrs": {n: os.getxattr(path, n, follow_symlinks=False)
                           for n in os.listxattr(path, follow_symlinks=False)},
            }  # fmt: skip
            if stat.S_ISREG(info.st_mode):
                fact |= {"size": info.st_size, "sha256": content_digest(path, info.st_size)}
            elif stat.S_ISLNK(info.st_mode):
                fact["target"] = os.readlink(path)
            elif stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
                fact["device"] = (os.major(info.st_rdev), os.minor(info.st_rdev))
            if not stat.S_ISDIR(info.st_mode):
                groups[info.st_dev, info.st_ino].append(key)
                fact["links"] = info.st_nlink
            found[key] = fact
    for names in groups.values():
        for name in names:
            found[name]["group"] = sorted(names)
    return found
