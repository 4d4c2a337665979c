"""What a snapshot consists of: stacks of layers, the engine's own state, what it was made of. Pure.

A layer is in the store, or still a file of the node that saved it: then it is named by that file
until it is stored. Stacks are ordered, lowest first. A snapshot without memory is booted from its
disk.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentenv.errors import InfraError
from agentenv.layer.layers import LayerId
from agentenv.model import Guest, Resources
from agentenv.store.records import SnapshotRow

# A machine's clock runs at the counter's rate that its kernel was told at its boot.
TSC_TOLERANCE = 0.001
_DIFFERENT = {
    "engine": "it was saved by the engine {saved}, here it is {here}",
    "version": "it was saved by version {saved} of the engine, here it is {here}",
    "accelerator": "it was saved under {saved}, here it is {here}",
    "cpu": "it was saved on a {saved}, here it is a {here}",
}


@dataclass(frozen=True, slots=True)
class Element:
    """One layer of a stack of ``blocks`` blocks: ``layer`` in the store, else the file ``raw``."""

    blocks: int
    layer: LayerId | None = None
    raw: str | None = None


Stack = tuple[Element, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """``parent``: the snapshot that the sandbox was restored from. ``features`` are those of the
    engine that saved it, ``state`` is its own, packed by ``pack``; ``memory`` is None if the
    disk alone was saved; ``disk`` is empty if all is one file, named as its memory, of which
    ``fresh`` says that the disk alone is to be restored."""

    id: str
    created: datetime
    sandbox_id: str
    parent: str | None
    image_id: str
    resources: Resources
    guest: Guest
    features: dict[str, str | int]
    disk: Stack
    memory: Stack | None
    state: str = ""
    fresh: bool = False

    @property
    def engine(self) -> str:
        return str(self.features["engine"])

    @property
    def raws(self) -> set[str]:
        """The files it still needs."""
        return {each.raw for each in (*self.disk, *(self.memory or ())) if each.raw}

    @property
    def layers(self) -> set[str]:
        return {each.layer for each in (*self.disk, *(self.memory or ())) if each.layer}

    def replaced(self, old: Stack, new: Element) -> Manifest:
        """The same with ``new`` where the elements ``old`` are in a row."""
        memory = self.memory
        return replace(
            self,
            disk=_replaced(self.disk, old, new),
            memory=None if memory is None else _replaced(memory, old, new),
        )


def _replaced(stack: Stack, old: Stack, new: Element) -> Stack:
    for at in range(len(stack) - len(old) + 1):
        if stack[at : at + len(old)] == old:
            return (*stack[:at], new, *stack[at + len(old) :])
    return stack


def misfit(saved: Mapping[str, str | int], here: Mapping[str, str | int]) -> str | None:
    """Why a machine with memory cannot go on in this engine; None if it can."""
    for name, text in _DIFFERENT.items():
        if saved.get(name) != here.get(name):
            return text.format(saved=saved.get(name), here=here.get(name))
    there, now = int(saved.get("tsc_khz", 0)), int(here.get("tsc_khz", 0))
    if abs(there - now) > TSC_TOLERANCE * max(there, now):
        return f"its clock counts {there} kHz, this machine's {now}"
    return None


def pack(state: bytes) -> str:
    return base64.b64encode(zlib.compress(state)).decode()


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


_MANIFEST = TypeAdapter(Manifest)


def to_doc(manifest: Manifest) -> dict[str, Any]:
    return _MANIFEST.dump_python(manifest, mode="json")


def from_doc(doc: object) -> Manifest:
    """Raises InfraError (``snapshot_damaged``)."""
    try:
        return _MANIFEST.validate_python(doc)
    except ValidationError as error:
        raise InfraError(
            "a snapshot's record cannot be read",
            why=str(error).splitlines()[0],
            code="snapshot_damaged",
        ) from error


def to_json(manifest: Manifest) -> bytes:
    return _MANIFEST.dump_json(manifest)


def from_json(data: bytes) -> Manifest:
    """Raises InfraError (``snapshot_damaged``)."""
    try:
        return _MANIFEST.validate_json(data)
    except ValidationError as error:
        raise InfraError(
            "a stored snapshot cannot be read",
            why=str(error).splitlines()[0],
            code="snapshot_damaged",
        ) from error


def to_row(manifest: Manifest) -> SnapshotRow:
    return SnapshotRow(
        manifest.id,
        manifest.parent,
        manifest.sandbox_id,
        manifest.image_id,
        manifest.created,
        to_doc(manifest),
    )
