"""The plain bytes of a file that may be compressed, in whatever way its magic number says."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Generator
from typing import Protocol

import zstandard

from agentenv.errors import ImageError

READ = 1 << 20  # bytes asked for at once
_MAGICS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}


class Readable(Protocol):
    """Anything that gives bytes in order."""

    def read(self, size: int, /) -> bytes: ...


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def compression(head: bytes) -> str | None:
    """The compression whose magic number ``head`` begins with."""
    for magic, name in _MAGICS.items():
        if head.startswith(magic):
            return name
    return None


def _decompressor(name: str) -> _Decompressor:
    match name:
        case "gzip":
            return zlib.decompressobj(wbits=31)
        case "zstd":
            return zstandard.ZstdDecompressor().decompressobj()
        case "bzip2":
            return bz2.BZ2Decompressor()
        case _:
            return lzma.LZMADecompressor()


def plain(blob: Readable) -> Generator[bytes]:
    """The uncompressed bytes of ``blob``, several streams in a row included."""
    head = blob.read(READ)
    name = compression(head)
    if name is None:
        while head:
            yield head
            head = blob.read(READ)
        return
    stream = _decompressor(name)
    while head:
        try:
            chunk = stream.decompress(head)
        except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
            raise ImageError(
                "the layer is damaged", why=f"{name}: {error}", code="layer_invalid"
            ) from error
        yield chunk
        if stream.eof:
            head = stream.unused_data or blob.read(READ)
            if not head.lstrip(b"\0"):
                return  # padding behind the last stream
            stream = _decompressor(name)
        else:
            head = blob.read(READ)
    if not stream.eof:
        raise ImageError("the layer is cut short", why=f"its {name} stream has no end")
