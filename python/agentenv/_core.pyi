"""Typed face of the Rust extension `agentenv._core` (rust/py)."""

from collections.abc import Sequence
from os import PathLike

def tsc_khz(milliseconds: int) -> int:
    """Rate of the time stamp counter in kHz, measured over ``milliseconds``; 0 off x86_64."""

class ObjectsError(Exception):
    """``args`` are a code (not_found, denied, unavailable, full, damaged, invalid, io) and a
    message that names store, key and cause."""

class Objects:
    """A store of whole immutable objects, in a directory or an S3-compatible store (rust/objects).

    Methods block, without the interpreter's lock, and raise ``ObjectsError``.
    """

    def __new__(cls, url: str) -> Objects: ...
    def get(self, key: str, limit: int) -> bytes: ...
    def get_range(self, key: str, start: int, end: int) -> bytes: ...
    def get_to(self, key: str, path: str | PathLike[str]) -> int: ...
    def put(self, key: str, data: bytes) -> None: ...
    def put_new(self, key: str, data: bytes) -> bool: ...
    def put_file(self, key: str, path: str | PathLike[str]) -> None: ...
    def head(self, key: str) -> tuple[int, float] | None:
        """Size and time of change; None if it is not there."""

    def list(self, prefix: str) -> list[tuple[str, int, float]]:
        """Key, size and time of change of each, by key."""

    def delete(self, keys: Sequence[str]) -> None: ...
    def sweep_drafts(self) -> int: ...
