"""Where the entries of an archive go in the guest: COPY's rules. Pure but for its streams.

``source`` is a path or pattern within the archive. A folder's content is merged into the
destination; a file goes into it if it is a folder, or is meant as one, else becomes it.
"""

from __future__ import annotations

import copy
import lzma
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from agentenv.errors import UserError

_GLOB = re.compile(r"[*?\[]")
# What an entry's extended header may say that this module decides, or the library does.
_DECIDED = ("path", "linkpath", "uid", "gid", "uname", "gname", "size", "mtime")


@dataclass(frozen=True, slots=True)
class Placing:
    """``base``: what is cut off of names. ``whole``: the name that is the source itself, of a file
    or a folder; None for a pattern. ``dest`` is absolute; ``is_folder``: it is one, or meant as
    one; ``exists``: it is one, and stays as it is.
    """

    base: str
    whole: str | None
    dest: str
    is_folder: bool
    exists: bool

    def place(self, name: str, is_folder: bool) -> str | None:
        """The absolute path for a clean name of the archive; None: it is no part of the source."""
        if self.whole is not None and name == self.whole:
            return self._whole(name, is_folder)
        inner = name if self.base == "" else name.removeprefix(self.base + "/")
        if inner == name and self.base != "":
            return None
        return posixpath.join(self.dest, inner)

    def _whole(self, name: str, is_folder: bool) -> str | None:
        if is_folder:
            return None if self.exists else self.dest
        return posixpath.join(self.dest, posixpath.basename(name)) if self.is_folder else self.dest


def plan(source: str, dest: str, *, exists: bool, files: Iterable[str] = ()) -> Placing:
    """``dest`` as in ``fold.Copy``; ``exists``: there is such a folder. ``files``: the names of
    what a pattern's archive holds, no folders: a pattern that means one file is that file."""
    means_folder = exists or dest.endswith("/")
    dest = dest.rstrip("/") or "/"
    source = clean(source)
    if not _GLOB.search(source):
        return Placing(source, source, dest, means_folder, exists)
    parts = source.split("/")
    fixed = next(at for at, part in enumerate(parts) if _GLOB.search(part))
    names = list(files)
    if len(names) == 1 and not means_folder:
        return Placing(names[0], names[0], dest, False, False)
    return Placing("/".join(parts[:fixed]), None, dest, True, exists)


def is_pattern(source: str) -> bool:
    return bool(_GLOB.search(source))


def clean(name: str) -> str:
    """A name without ``.`` parts; "" is the archive's root. Raises UserError (``bad_archive``)."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise UserError(f"the archive's entry {name!r} leads out of it", code="bad_archive")
    return "/".join(parts)


def file_names(archive: IO[bytes]) -> list[str]:
    """What a pattern has matched, as far as it is no folder. Raises UserError."""
    with _opened(archive) as tar:
        return [clean(info.name) for info in tar if not info.isdir()]


def move(
    archive: IO[bytes],
    out: IO[bytes],
    placing: Placing,
    *,
    owner: tuple[int, int] | None,
    mode: int | None,
) -> int:
    """Write the archive (tar, also compressed) with entries where they go, relative to the root.

    ``owner`` None keeps the archive's. How many entries there were. Raises UserError
    (``bad_archive``), OSError.
    """
    count = 0
    with (
        _opened(archive) as tar,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as to,
    ):
        try:
            for info in tar:
                moved = _moved(info, placing, owner, mode)
                if moved is not None:
                    to.addfile(moved, tar.extractfile(info) if info.isreg() else None)
                count += 1
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise _bad(error) from error
        except OSError as error:
            if error.errno is not None:
                raise  # of a file or pipe, not the library's word on what it read
            raise _bad(error) from error
    return count


def _opened(archive: IO[bytes]) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=archive, mode="r|*")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _bad(error) from error


def _bad(error: Exception) -> UserError:
    return UserError("the uploaded files are no tar archive", why=str(error), code="bad_archive")


def _moved(
    info: tarfile.TarInfo, placing: Placing, owner: tuple[int, int] | None, mode: int | None
) -> tarfile.TarInfo | None:
    place = placing.place(clean(info.name), info.isdir())
    if place is None:
        return None
    moved = copy.copy(info)
    moved.name = place.lstrip("/") or "."
    if info.islnk():
        target = placing.place(clean(info.linkname), False)
        if target is None:
            raise UserError(
                f"{info.name!r} is a link to what is not copied with it", code="bad_archive"
            )
        moved.linkname = target.lstrip("/")
    if info.issparse():
        moved.type = tarfile.REGTYPE  # holes are read as zeroes
    moved.pax_headers = {
        key: value
        for key, value in info.pax_headers.items()
        if key not in _DECIDED and not key.startswith("GNU.sparse")
    }
    moved.uname = moved.gname = ""
    if owner is not None:
        moved.uid, moved.gid = owner
    if mode is not None and not info.issym():
        moved.mode = mode
    return moved
