"""Images that lie in a folder or tar: OCI layouts (``oci:``, ``oci-archive:``), ``docker save``.

OCI image-layout: ``index.json`` names manifests by digest, blobs are ``blobs/sha256/<hex>``.
``docker save``: ``manifest.json`` lists for each image its configuration and layer files.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import tarfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from agentenv.errors import ImageError, faults
from agentenv.image import manifest as m
from agentenv.image.compression import READ, compression, plain
from agentenv.image.reference import LocalImage
from agentenv.image.source import OpenBlob, Report, SourceLayer, source_layers
from agentenv.model import ImageConfig
from agentenv.store.drafts import Drafts


class Files(Protocol):
    """Named files of a folder or tar."""

    def open(self, name: str) -> BinaryIO:
        """Raises KeyError."""
        ...

    def size(self, name: str) -> int: ...


class FolderFiles:
    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> BinaryIO:
        try:
            return self._path(name).open("rb")
        except OSError as error:
            raise KeyError(name) from error

    def size(self, name: str) -> int:
        return self._path(name).stat().st_size

    def _path(self, name: str) -> Path:
        path = self._root / name
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise KeyError(name)
        return path


class TarFiles:
    """Members of an uncompressed tar, by offset; links among them are followed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tuple[int, int]] = {}
        links: dict[str, str] = {}
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                name = os.path.normpath(member.name)
                if member.isreg():
                    self._members[name] = (member.offset_data, member.size)
                elif member.issym():
                    links[name] = os.path.normpath(Path(name).parent / member.linkname)
                elif member.islnk():
                    links[name] = os.path.normpath(member.linkname)
        for name, target in links.items():
            if target in self._members:
                self._members[name] = self._members[target]

    def open(self, name: str) -> BinaryIO:
        offset, size = self._members[os.path.normpath(name)]
        return cast("BinaryIO", io.BufferedReader(_Slice(self._path, offset, size), READ))

    def size(self, name: str) -> int:
        return self._members[os.path.normpath(name)][1]


class _Slice(io.RawIOBase):
    """Part of a file."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(offset)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: self._left]
        count = self._file.readinto(view) or 0
        if not count and self._left:
            raise ImageError("the archive is cut short", code="archive_invalid")
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class ArchivedImage:
    """Implements ``ImageSource``; ``names`` maps a layer's digest to its file."""

    files: Files
    digest: str
    config: ImageConfig
    layers: tuple[SourceLayer, ...]
    names: dict[str, str]

    @asynccontextmanager
    async def blob(self, layer: SourceLayer, report: Report) -> AsyncGenerator[OpenBlob]:
        name = self.names[layer.digest]
        found = await asyncio.to_thread(_sha256, self.files, name)
        if found != layer.digest:
            raise m.mismatch(name, layer.digest, found)
        report(layer.digest, "fetch", layer.size, layer.size)
        yield lambda: self.files.open(name)


def _sha256(files: Files, name: str) -> str:
    hasher = hashlib.sha256()
    try:
        with files.open(name) as file:
            while chunk := file.read(READ):
                hasher.update(chunk)
    except KeyError as error:
        raise _lacks(name) from error
    return "sha256:" + hasher.hexdigest()


@asynccontextmanager
async def opened(reference: LocalImage, drafts: Drafts) -> AsyncGenerator[ArchivedImage]:
    """Open an image of kind ``oci``, ``oci-archive`` or ``docker-archive``. Raises ImageError."""
    if reference.kind == "oci":
        yield _layout(FolderFiles(reference.path), reference.tag)
        return
    async with _tar_files(reference.path, drafts) as files:
        if reference.kind == "docker-archive":
            yield await asyncio.to_thread(_docker, files, reference.tag)
        else:
            yield _layout(files, reference.tag)


@asynccontextmanager
async def _tar_files(path: Path, drafts: Drafts) -> AsyncGenerator[TarFiles]:
    with path.open("rb") as file:
        compressed = compression(file.read(8)) is not None
    try:
        if not compressed:
            yield await asyncio.to_thread(TarFiles, path)
            return
        async with drafts.draft() as draft:
            await asyncio.to_thread(_expand, path, draft.path)
            yield await asyncio.to_thread(TarFiles, draft.path)
    except tarfile.TarError as error:
        raise ImageError(f"{path} is no archive", why=str(error), code="archive_invalid") from error


def _expand(source: Path, target: Path) -> None:
    with (
        faults("the archive could not be expanded"),
        target.open("wb") as out,
        source.open("rb") as file,
    ):
        for chunk in plain(file):
            out.write(chunk)


def _read(files: Files, name: str) -> bytes:
    try:
        with files.open(name) as file:
            return file.read(m.MAX_BYTES + 1)
    except KeyError as error:
        raise _lacks(name) from error


def _lacks(name: str) -> ImageError:
    return ImageError("the archive is incomplete", why=f"it lacks {name}", code="archive_invalid")


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _checked(files: Files, digest: str) -> dict[str, Any]:
    data = _read(files, _blob_name(digest))
    m.check_digest(_blob_name(digest), data, digest)
    return m.document(data)


def _layout(files: Files, tag: str | None) -> ArchivedImage:
    offered = m.choices(m.document(_read(files, "index.json")))
    if tag is not None:
        offered = [choice for choice in offered if choice.name == tag]
    elif len({choice.name for choice in offered}) > 1:
        names = ", ".join(sorted(choice.name for choice in offered))
        raise ImageError(
            "the layout holds several images", why=names, fix="name one: oci:DIR:TAG",
            code="image_ambiguous",
        )  # fmt: skip
    if not offered:
        raise ImageError("the layout does not hold that image", code="image_not_found")
    architecture = m.host_architecture()
    chosen = m.choose(offered, architecture) if len(offered) > 1 else offered[0]
    doc = _checked(files, chosen.digest)
    digest = chosen.digest
    for _ in range(m.MAX_NESTED):
        if not m.is_index(doc):
            break
        digest = m.choose(m.choices(doc), architecture).digest
        doc = _checked(files, digest)
    manifest = m.manifest(doc)
    config = m.configuration(
        _checked(files, manifest.config.digest), len(manifest.layers), architecture
    )
    layers = source_layers(manifest, config)
    names = {layer.digest: _blob_name(layer.digest) for layer in layers}
    return ArchivedImage(files, digest, config.image, layers, names)


def _docker(files: Files, tag: str | None) -> ArchivedImage:
    try:
        images: list[dict[str, Any]] = json.loads(_read(files, "manifest.json"))
        if tag is not None:
            images = [image for image in images if tag in (image.get("RepoTags") or ())]
        if len(images) != 1:
            names = [name for image in images for name in image.get("RepoTags") or ()]
            raise ImageError(
                f"the archive holds {len(images)} images" + (f" named {tag}" if tag else ""),
                why=", ".join(names),
                fix="name one: docker-archive:FILE:NAME:TAG",
                code="image_ambiguous" if images else "image_not_found",
            )
        config_data = _read(files, images[0]["Config"])
        layer_names: list[str] = list(images[0]["Layers"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageError(
            "the archive's manifest.json is invalid", why=str(error), code="manifest_invalid"
        ) from error
    config = m.configuration(m.document(config_data), len(layer_names), m.host_architecture())
    layers: list[SourceLayer] = []
    held: dict[str, str] = {}
    for diff_id, name in zip(config.diff_ids, layer_names, strict=True):
        # The archive gives no digest of the file; the diff id is checked when it is converted.
        digest = _sha256(files, name)
        layers.append(SourceLayer(diff_id, digest, files.size(name)))
        held[digest] = name
    return ArchivedImage(files, m.digest_of(config_data), config.image, tuple(layers), held)
