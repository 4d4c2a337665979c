"""The images of a home: pulled, found, given as files, removed. Safe from several processes.

A pull holds the lock ``images`` shared from its first look at the store until its record is
written; what removes unused blobs holds it alone, so it never takes one that a pull counts on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentenv.concurrency import KeyedLocks
from agentenv.errors import ImageError, NotFound, UserError
from agentenv.host.files import file_lock, try_file_lock
from agentenv.image.open import opened
from agentenv.image.reference import LocalImage, parse
from agentenv.image.registry import RegistrySettings
from agentenv.image.source import ImageSource, Report, SourceLayer, quiet
from agentenv.layer import convert
from agentenv.model import ImageConfig
from agentenv.store.blobs import Blobs
from agentenv.store.records import ImageRow, Records

log = logging.getLogger(__name__)

LOCK = "images"
FETCHES = 4  # layers fetched at once; registries throttle clients that ask for more
ID_LENGTH = 20
_CONFIG = TypeAdapter(ImageConfig)


@dataclass(frozen=True, slots=True)
class Image:
    """A stored image. ``size`` is what it takes in the store, shared layers included."""

    id: str
    reference: str
    digest: str
    created: datetime
    config: ImageConfig
    diff_ids: tuple[str, ...]
    size: int


class ImageCatalog:
    """``folder`` holds the lock file; it must exist."""

    def __init__(
        self, folder: Path, blobs: Blobs, records: Records, settings: RegistrySettings
    ) -> None:
        self.blobs, self.settings = blobs, settings
        self._lock = folder / "images.lock"
        self._records = records
        self._pulling = KeyedLocks()
        self._fetches = asyncio.Semaphore(FETCHES)
        self._conversions = asyncio.Semaphore(os.cpu_count() or 1)

    async def pull(self, text: str, report: Report = quiet) -> Image:
        """Bring an image into the store; what is there already is not fetched again.

        Raises UserError for a bad reference, ImageError, InfraError; nothing is left of a pull
        that failed or was cancelled.
        """
        reference = parse(text)
        try:
            async with (
                file_lock(self._lock, LOCK, shared=True),
                opened(reference, self.settings, self.blobs) as source,
            ):
                await self._store_layers(source, report)
                return await self._record(str(reference), source)
        except BaseException:
            await asyncio.shield(self.collect())
            raise

    async def pull_remote(self, text: str) -> Image:
        """For requests from afar: an image by registry reference or Debian suite, pulled if it is
        not there. A path would name the server's files: UserError (``invalid_reference``)."""
        reference = parse(text)
        if isinstance(reference, LocalImage):
            raise UserError(
                f"{text} is a path on the server's machine",
                fix="pull it there: aenv image pull",
                code="invalid_reference",
            )
        async with self._pulling.hold(str(reference)):
            row = await self._records.image(str(reference))
            return _image(row) if row else await self.pull(text)

    async def _store_layers(self, source: ImageSource, report: Report) -> None:
        unique = {layer.diff_id: layer for layer in source.layers}
        try:
            async with asyncio.TaskGroup() as group:
                for layer in unique.values():
                    group.create_task(self._store_layer(source, layer, report))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _store_layer(self, source: ImageSource, layer: SourceLayer, report: Report) -> None:
        tree_key, data_key = convert.layer_keys(layer.diff_id)
        async with file_lock(self._lock, tree_key):
            if await self.blobs.path(tree_key) and await self.blobs.path(data_key):
                report(layer.digest, "exists", layer.size, layer.size)
                return
            async with self._fetches, source.blob(layer, report) as open_blob:
                done = 0

                def advance(count: int) -> None:
                    nonlocal done
                    done += count
                    report(layer.digest, "convert", done, layer.size)

                async with self._conversions:
                    await convert.convert(self.blobs, layer.diff_id, open_blob, advance)
            report(layer.digest, "done", layer.size, layer.size)

    async def _record(self, reference: str, source: ImageSource) -> Image:
        diff_ids = tuple(layer.diff_id for layer in source.layers)
        meta = convert.meta_key(diff_ids)
        async with file_lock(self._lock, meta):
            if not await self.blobs.path(meta):
                await convert.write_metadata(self.blobs, diff_ids)
        keys = [meta, *(key for diff_id in diff_ids for key in convert.layer_keys(diff_id))]
        sizes = [path.stat().st_size for path in await convert.segments(self.blobs, diff_ids)]
        row = ImageRow(
            id=hashlib.sha256(f"{reference}\n{source.digest}".encode()).hexdigest()[:ID_LENGTH],
            reference=reference,
            digest=source.digest,
            created=datetime.now(UTC),
            layers=tuple(dict.fromkeys(keys)),
            doc={
                "config": asdict(source.config),
                "diff_ids": list(diff_ids),
                "layers": [asdict(layer) for layer in source.layers],
                "size": sum(sizes),
            },
        )
        await self._records.put_image(row)
        return _image(row)

    async def find(self, key: str) -> Image:
        """By id, its beginning, or reference in any spelling. Raises NotFound, UserError."""
        row = await self._records.image(key)
        if row is None:
            rows = await self._records.images()
            begun = [row for row in rows if len(key) >= 4 and row.id.startswith(key)]
            row = begun[0] if len(begun) == 1 else None
        if row is None:
            try:
                row = await self._records.image(str(parse(key)))
            except UserError:
                row = None
        if row is None:
            raise NotFound(
                f"image '{key}' is not here", fix=f"aenv image pull {key}", code="image_not_found"
            )
        return _image(row)

    async def list(self) -> list[Image]:
        return [_image(row) for row in await self._records.images()]

    async def segments(self, image_id: str) -> tuple[Path, ...]:
        """The files of the flat image, in order. Raises NotFound, ImageError."""
        image = await self.find(image_id)
        return await convert.segments(self.blobs, image.diff_ids)

    async def remove(self, image_id: str) -> None:
        """Forget an image and delete what no other needs. Raises NotFound, Conflict if in use."""
        image = await self.find(image_id)
        await self._records.drop_image(image.id)
        await self.collect()

    async def collect(self) -> int:
        """Delete blobs of no image, and drafts whose writer died; how many.

        While somebody pulls, nothing is deleted: what is left is found the next time.
        """
        async with try_file_lock(self._lock, LOCK) as alone:
            removed = await self.blobs.sweep()
            if not alone:
                return removed
            unused = await self.blobs.keys() - await self._records.layers_in_use()
            for key in sorted(unused):
                await self.blobs.delete(key)
            return removed + len(unused)


def _image(row: ImageRow) -> Image:
    doc: dict[str, Any] = row.doc
    try:
        found = _CONFIG.validate_python(doc["config"])
    except ValidationError as error:
        raise ImageError(
            f"the record of image {row.id} is of another version", why=str(error),
            fix="pull it again", code="image_incomplete",
        ) from error  # fmt: skip
    return Image(
        row.id, row.reference, row.digest, row.created, found, tuple(doc["diff_ids"]), doc["size"]
    )
