"""The contract of image sources, and the one place that knows them all.

An opened source tells what the image is before a byte of a layer moves, so layers that are
stored already are never fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from agentenv.image.manifest import Configuration, Manifest
from agentenv.model import ImageConfig

# Layer digest, stage (``fetch``, ``convert``, ``done``, ``exists``), bytes done, bytes in all.
Report = Callable[[str, str, int, int], None]
OpenBlob = Callable[[], BinaryIO]


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """``diff_id`` is over the plain tar, ``digest`` over the blob as the source holds it."""

    diff_id: str
    digest: str
    size: int


def source_layers(manifest: Manifest, configuration: Configuration) -> tuple[SourceLayer, ...]:
    """The layers of a manifest with their diff ids, of which there are as many."""
    pairs = zip(configuration.diff_ids, manifest.layers, strict=True)
    return tuple(SourceLayer(diff_id, layer.digest, layer.size) for diff_id, layer in pairs)


class ImageSource(Protocol):
    """An image that can be read. ``digest`` identifies its content with its configuration."""

    @property
    def digest(self) -> str: ...
    @property
    def config(self) -> ImageConfig: ...
    @property
    def layers(self) -> tuple[SourceLayer, ...]: ...

    def blob(self, layer: SourceLayer, report: Report) -> AbstractAsyncContextManager[OpenBlob]:
        """Have the layer's blob at hand: yields what opens it, several times if need be.

        Raises ImageError (``digest_mismatch``: it is not what the image names), InfraError.
        """
        ...


def quiet(_digest: str, _stage: str, _done: int, _total: int) -> None:
    """A report that nobody reads."""
