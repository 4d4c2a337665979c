"""Reads a layer's tar forward, compressed or not, in bounded memory.

The standard library parses the headers (GNU, PAX, sparse forms); what a header means for a layer
is decided in ``unpack``.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Generator

from agentenv.errors import ImageError
from agentenv.image.compression import READ, Readable, plain

# Documented by neither the library nor its type stubs, part of it since Python 2.7.
_EndOfArchive: type[tarfile.HeaderError] = vars(tarfile)["EOFHeaderError"]
_EndOfFile: type[tarfile.HeaderError] = vars(tarfile)["EmptyHeaderError"]
MAX_HEADER = 64 << 20  # of one header with its extensions; the largest real ones hold ACLs


class TarReader:
    """A forward-only file over the plain bytes: what ``tarfile`` needs to parse headers.

    ``diff_id`` is known after ``drain``. ``check`` is called now and then; it may raise.
    """

    def __init__(self, blob: Readable, check: Callable[[], None]) -> None:
        self._source, self.check = plain(blob), check
        self._buffer = memoryview(b"")
        self._position = 0
        self._hash = hashlib.sha256()

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        """Skip forward."""
        if position < self._position:
            raise ImageError("the layer's tar points backwards", code="layer_invalid")
        while self._position < position and self.some(position - self._position):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, fewer only at the end."""
        if size > MAX_HEADER:
            raise ImageError("a header of the layer's tar is too long", code="layer_invalid")
        parts: list[memoryview] = []
        while size and (part := self.some(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def some(self, size: int) -> memoryview:
        """One to ``size`` bytes, none at the end; without a copy."""
        while not self._buffer:
            chunk = next(self._source, None)
            if chunk is None:
                return memoryview(b"")
            self.check()
            self._hash.update(chunk)
            self._buffer = memoryview(chunk)
        part, self._buffer = self._buffer[:size], self._buffer[size:]
        self._position += len(part)
        return part

    def drain(self) -> str:
        """Read to the end; the layer's diff id, ``sha256:…`` over the plain bytes."""
        while self.some(READ):
            pass
        return "sha256:" + self._hash.hexdigest()


def members(reader: TarReader) -> Generator[tarfile.TarInfo]:
    """Each header in turn; the consumer reads the member's data before it asks for the next.

    Raises ImageError (``layer_invalid``) for what is no tar, at its start or later.
    """
    archive = _Headers(reader)
    while True:
        try:
            member = tarfile.TarInfo.fromtarfile(archive)
        except _EndOfArchive:
            return
        except _EndOfFile:
            if archive.offset == 0:
                raise ImageError("the layer is empty", why="it is no tar archive") from None
            return
        except (tarfile.TarError, ValueError, OverflowError, IndexError) as error:
            raise ImageError(
                "the layer is no tar archive" if archive.offset == 0 else "the layer is damaged",
                why=f"{error} at byte {archive.offset}",
                code="layer_invalid",
            ) from error
        following = archive.offset
        yield member
        reader.seek(following)
        if reader.tell() < following:
            raise ImageError("the layer is cut short", why=f"at byte {reader.tell()}")


class _Headers(tarfile.TarFile):
    """The state that the standard library's header parser keeps, over a forward-only file.

    ``TarFile`` itself would parse one header ahead and take damage in the middle for the end.
    """

    def __init__(self, reader: TarReader) -> None:
        self.fileobj = reader  # pyright: ignore[reportAttributeAccessIssue]
        self.offset = 0
        self.encoding, self.errors = "utf-8", "surrogateescape"
        self.pax_headers = {}
        self.tarinfo = tarfile.TarInfo
