"""Typed face of the Rust extension `agentenv._core` (rust/py)."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TypeAlias

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

Chunk: TypeAlias = tuple[bytes, int, int, int, str, int]
"""Id (32 bytes), stored bytes, blocks when plain, codec, pack, offset in the pack."""

class Layer:
    """A layer's table (docs/FORMATS.md). Methods raise ValueError for what is damaged."""

    @staticmethod
    def decode(data: bytes) -> Layer: ...
    def encode(self) -> bytes: ...
    @property
    def id(self) -> str: ...
    @property
    def blocks(self) -> int:
        """The logical length in blocks of 4096 bytes."""

    @property
    def data_bytes(self) -> int:
        """Bytes that are neither hole nor zero."""

    @property
    def packs(self) -> list[str]: ...
    def chunks(self) -> list[Chunk]: ...
    def moved(self, places: Sequence[Chunk]) -> Layer:
        """The same layer with these chunks at these places."""

class WrittenLayer:
    @property
    def layer(self) -> Layer: ...
    @property
    def pack(self) -> tuple[str, int] | None:
        """Id and bytes of the pack of new chunks; None if every chunk was known."""

    @property
    def fresh_bytes(self) -> int:
        """Plain bytes of the chunks in the pack."""

def write_layer(
    source: str | PathLike[str],
    blocks: int,
    spans: Sequence[tuple[int, int, int | None]],
    window: int,
    known: Callable[[list[bytes]], Sequence[Chunk | None]],
    pack: str | PathLike[str],
) -> WrittenLayer:
    """A layer of ``spans`` (first block, blocks, byte offset in ``source`` or None for
    zeroes), in order and apart,
    its new chunks in a pack at ``pack``. ``window``: blocks of a chunk, 0 cuts by content.
    ``known`` is asked for places of chunks; what it raises is raised. OSError, ValueError."""

def unpack_layer(objects: Objects, layer: Layer, path: str | PathLike[str], at: int) -> None:
    """The layer's blocks from the store into a file, from block ``at`` on; holes stay holes.
    Raises ObjectsError, ValueError (damaged), OSError."""

def pack_chunks(objects: Objects, id: str, size: int) -> list[Chunk]:
    """What a stored pack of ``size`` bytes holds, by its own directory."""

def repack(
    objects: Objects, chunks: Sequence[Chunk], path: str | PathLike[str]
) -> tuple[str, int, list[Chunk]]:
    """Copy chunks, verified, into a new pack at ``path``: its id, its bytes, their new places."""

def verify_chunks(objects: Objects, chunks: Sequence[Chunk]) -> list[tuple[str, str]]:
    """Ids of the chunks whose stored bytes are not theirs, each with the reason."""

def stack_id(blocks: int, layers: Sequence[tuple[str, int]]) -> str:
    """The name of the stack of these layers (id, first block), lowest first."""

class Pages:
    """Pages that a process has to save. Runs of pages are packed: first page, pages, whether they
    are zeroes, each 4 bytes, little-endian."""

    @staticmethod
    def find(pid: int, at: int, size: int, file: bool) -> Pages:
        """Those of ``size`` bytes at address ``at`` that the process changed since it mapped them
        privately; with ``file`` those that the memory file mapped there has. OSError."""

    @property
    def size(self) -> int:
        """Bytes."""

    def copy(self) -> HeldPages:
        """Copy them out: the process may go on. OSError."""

    def write(self, path: str | PathLike[str]) -> tuple[bytes, int]:
        """Write them to an existing file, each page at its own place, zeroes left out: the runs,
        and the bytes that are no zeroes. OSError."""

class HeldPages:
    def write(self, path: str | PathLike[str]) -> tuple[bytes, int]:
        """As ``Pages.write``."""

def layer_runs(layer: Layer) -> bytes:
    """The runs that a layer holds."""

def run_spans(runs: bytes) -> list[tuple[int, int, int | None]]:
    """Runs as the spans of a flat file. ValueError."""

def merge_runs(layers: Sequence[bytes]) -> bytes:
    """The runs of layers laid over one another, lowest first, zeroes among them. ValueError."""

def memory_map(layers: Sequence[tuple[str | PathLike[str], bytes]]) -> bytes:
    """The map by which `agentenv-map` lays memory out of flat files with these runs, lowest first.
    ValueError."""
