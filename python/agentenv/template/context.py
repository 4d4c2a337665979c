"""The build context of a Dockerfile: which of its files an instruction means, packed for upload.

Read on the machine of whoever builds. Files are root's in the archive, as Docker has them; a source
that is a link is followed, within the context, links below it stay links.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from e2b_dockerfile_utils import PatternMatcher

from agentenv.errors import UserError
from agentenv.template.instructions import FromContext, fault
from agentenv.template.placing import clean, is_pattern
from agentenv.template.recipe import Kind, Step

CHUNK = 1 << 20
IGNORE = ".dockerignore"
# Compressions that ADD recognizes (and no name makes an archive of what is none).
_ARCHIVE_MODE = "r:*"


@dataclass(frozen=True, slots=True)
class Item:
    """A file of the context and its name in the archive; ``unpacks``: its content is put there."""

    path: Path
    name: str
    unpacks: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """What one instruction copies: the step, and what its archive holds."""

    step: Step
    items: tuple[Item, ...]


class Context:
    """``folder`` without what ``ignore`` (lines of .dockerignore) leaves out. Raises UserError."""

    def __init__(self, folder: Path, ignore: Sequence[str] = ()) -> None:
        self.folder = folder.resolve()
        try:
            self._ignored = PatternMatcher(list(ignore))
        except ValueError as error:
            raise UserError(
                f"{IGNORE} cannot be used", why=str(error), code="dockerfile"
            ) from error

    @classmethod
    def open(cls, folder: Path, dockerfile: Path) -> Context:
        """With the Dockerfile's own ignore file, else the folder's."""
        for path in (dockerfile.with_name(dockerfile.name + IGNORE), folder / IGNORE):
            if path.is_file():
                return cls(folder, path.read_text(encoding="utf-8-sig").splitlines())
        return cls(folder)

    def pack(self, wanted: FromContext) -> Packed:
        """Find what an instruction copies and name it by its content. Raises UserError."""
        found = [path for source in wanted.sources for path in self._sources(source, wanted)]
        single = len(found) == 1 and len(wanted.sources) == 1 and found[0][1].is_file()
        items: list[Item] = []
        for name, path in found:
            unpacks = wanted.unpacks and path.is_file() and _is_archive(path)
            single = single and not unpacks
            items += self._items(name, path, unpacks)
        items = sorted({item.name: item for item in items}.values(), key=lambda item: item.name)
        source = items[0].name if single else "."
        dest = wanted.dest if single or wanted.dest.endswith("/") else wanted.dest + "/"
        step = Step(
            Kind.COPY,
            (source, dest, wanted.owner, wanted.mode),
            files=digest(items),
            keep_owner=True,
            escape=wanted.escape,
            text=wanted.text,
            line=wanted.line,
        )
        return Packed(step, tuple(items))

    def _sources(self, source: str, wanted: FromContext) -> list[tuple[str, Path]]:
        """Paths that a pattern means, each with its name in the context."""
        try:
            pattern = clean(posixpath.normpath(source).lstrip("/"))
        except UserError:
            raise fault(wanted.line, f"{source} leads out of the build context") from None
        names = [""]
        for part in filter(None, pattern.split("/")):
            names = [found for name in names for found in self._below(name, part)]
        kept = [name for name in names if not name or not self._is_ignored(name)]
        if not kept:
            why = f"{IGNORE} leaves it out" if names else ""
            raise fault(wanted.line, f"{source} is not in the build context", why)
        return [(name, self._real(name, wanted)) for name in kept]

    def _below(self, name: str, part: str) -> list[str]:
        folder = self.folder / name
        if not is_pattern(part):
            return [posixpath.join(name, part)] if os.path.lexists(folder / part) else []
        if not folder.is_dir():
            return []
        # Go's patterns negate a class by ^, Python's by !.
        pattern = re.sub(r"\[\^", "[!", part)
        found = sorted(entry for entry in os.listdir(folder) if fnmatchcase(entry, pattern))
        return [posixpath.join(name, entry) for entry in found]

    def _is_ignored(self, name: str) -> bool:
        if not self._ignored.matches(name):
            return False
        is_folder = (self.folder / name).is_dir()
        return not (is_folder and self._ignored.may_match_under(name))

    def _real(self, name: str, wanted: FromContext) -> Path:
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder):
            raise fault(wanted.line, f"{name} leads out of the build context")
        if not path.exists():
            raise fault(wanted.line, f"{name} is a link to what is not there")
        return path

    def _items(self, name: str, path: Path, unpacks: bool) -> Iterator[Item]:
        if not path.is_dir():
            yield Item(path, "." if unpacks else posixpath.basename(name), unpacks)
            return
        yield Item(path, ".")
        yield from self._tree(path, str(path.relative_to(self.folder)), "")

    def _tree(self, folder: Path, name: str, inner: str) -> Iterator[Item]:
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            own = entry.name if name in ("", ".") else f"{name}/{entry.name}"
            target = f"{inner}/{entry.name}".lstrip("/")
            is_folder = entry.is_dir(follow_symlinks=False)
            ignored = self._ignored.matches(own)
            if not ignored:
                yield Item(Path(entry.path), target)
            if is_folder and (not ignored or self._ignored.may_match_under(own)):
                yield from self._tree(Path(entry.path), own, target)


def _is_archive(path: Path) -> bool:
    try:
        with tarfile.open(path, _ARCHIVE_MODE) as tar:
            return tar.next() is not None
    except (tarfile.TarError, OSError, EOFError):
        return False


def digest(items: Sequence[Item]) -> str:
    """SHA-256 over names, modes and content; not over times, nor who owns them here."""
    hasher = hashlib.sha256()
    for item in items:
        status = item.path.lstat()
        is_link, is_file = stat.S_ISLNK(status.st_mode), stat.S_ISREG(status.st_mode)
        size = status.st_size if is_file else 0
        hasher.update(f"{item.name}\0{status.st_mode:o}\0{size}\0{item.unpacks}\0".encode())
        if is_link:
            hasher.update(os.fsencode(item.path.readlink()))
        elif is_file:
            with _reading(item.path) as file:
                while piece := file.read(CHUNK):
                    hasher.update(piece)
    return hasher.hexdigest()


def write(items: Sequence[Item], out: IO[bytes]) -> None:
    """The archive of ``items``. Raises UserError for what cannot be read."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for item in items:
            if item.unpacks:
                _write_archive(tar, item.path)
                continue
            info = tar.gettarinfo(item.path, item.name)
            if info is None:  # pyright: ignore[reportUnnecessaryComparison]  # a socket
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if info.isreg():
                with _reading(item.path) as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)


def _write_archive(tar: tarfile.TarFile, path: Path) -> None:
    """The content of an archive in place of it, with its own owners."""
    with tarfile.open(path, _ARCHIVE_MODE) as inner:
        for info in inner:
            tar.addfile(info, inner.extractfile(info) if info.isreg() else None)


def _reading(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read", why=error.strerror or "") from error
