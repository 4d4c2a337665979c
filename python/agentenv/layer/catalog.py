"""The images of a home: pulled, found, given as files, removed. Safe from several processes.

The store is shared with other nodes. What a pull counts on there is kept by a lease while it runs,
afterwards by a claim: an object ``claim/HOME/IMAGE`` with the keys of all that the image needs. An
image that another node pulled (``image/ID``) is claimed, not made again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import StrictStr, TypeAdapter, ValidationError

from agentenv.concurrency import KeyedLocks
from agentenv.errors import AgentEnvError, ImageError, NotFound, UserError
from agentenv.host.files import file_lock, try_file_lock
from agentenv.image.credentials import Credentials
from agentenv.image.open import opened
from agentenv.image.reference import LocalImage, StoreImage, parse
from agentenv.image.registry import RegistrySettings
from agentenv.image.source import ImageSource, Report, SourceLayer, quiet
from agentenv.layer import convert
from agentenv.layer.layers import BLOCK, Layers, Part
from agentenv.model import ImageConfig
from agentenv.store import lease as leases
from agentenv.store.claims import Claims
from agentenv.store.collection import Collection
from agentenv.store.lease import Lease
from agentenv.store.records import ImageRow, Records

log = logging.getLogger(__name__)

LOCK = "images"
FETCHES = 4  # layers fetched at once; registries throttle clients that ask for more
ID_LENGTH = 20
MAX_IMAGE = 64 << 20  # bytes of an image's record in the store
_CONFIG = TypeAdapter(ImageConfig)
_RECORD = TypeAdapter(dict[str, Any])
_PARTS = TypeAdapter(tuple[Part, ...])
_NAMES = TypeAdapter(list[StrictStr])


@dataclass(frozen=True, slots=True)
class Image:
    """A stored image: ``parts`` side by side are its flat form, metadata first; ``size`` is that
    in bytes, shared layers included."""

    id: str
    reference: str
    digest: str
    created: datetime
    config: ImageConfig
    diff_ids: tuple[str, ...]
    parts: tuple[Part, ...]
    size: int


class ImageCatalog:
    """``folder`` holds the lock file; it must exist."""

    def __init__(
        self,
        folder: Path,
        layers: Layers,
        records: Records,
        claims: Claims,
        collection: Collection,
        settings: RegistrySettings,
    ) -> None:
        self.layers, self.settings, self.collection = layers, settings, collection
        self._lock = folder / "images.lock"
        self._records, self._claims = records, claims
        self._pulling = KeyedLocks()
        self._fetches = asyncio.Semaphore(FETCHES)
        self._conversions = asyncio.Semaphore(os.cpu_count() or 1)

    async def pull(
        self, text: str, report: Report = quiet, login: Credentials | None = None
    ) -> Image:
        """Bring an image into the store; what is there already is not fetched again.

        ``login``: for its registry, instead of what Docker's configuration has.

        Raises UserError for a bad reference, ImageError, InfraError; of a pull that failed or was
        cancelled nothing is left that the next collection would not take.
        """
        reference = parse(text)
        if isinstance(reference, StoreImage):
            return await self._pull_stored(reference)
        settings = replace(self.settings, login=login)
        opening = opened(reference, settings, self.layers.drafts)
        return await self.add(str(reference), opening, report)

    async def add(
        self,
        reference: str,
        opening: AbstractAsyncContextManager[ImageSource],
        report: Report = quiet,
    ) -> Image:
        """Bring what is opened here into the store, under a reference. Raises as ``pull``."""
        try:
            async with (
                file_lock(self._lock, LOCK, shared=True),
                leases.hold(self.layers.objects) as lease,
                opening as source,
            ):
                row = await self._stored(image_id(reference, source.digest), lease)
                if row is None:
                    await self.layers.learn()
                    parts = await self._store_layers(source, lease, report)
                    row = await self._make(reference, source, parts, lease)
                return await self._keep(row, lease)
        except BaseException:
            await asyncio.shield(self._clean())
            raise

    async def _pull_stored(self, reference: StoreImage) -> Image:
        async with (
            file_lock(self._lock, LOCK, shared=True),
            leases.hold(self.layers.objects) as lease,
        ):
            row = await self._stored(reference.id, lease)
            if row is None:
                raise NotFound(
                    f"image {reference.id} is not in the store",
                    fix="aenv image ls --store shows those that are",
                    code="image_not_found",
                )
            return await self._keep(row, lease)

    async def _keep(self, row: ImageRow, lease: Lease) -> Image:
        image = _image(row)
        lease.check()
        await self._claims.put(row.id, row.doc["keys"])
        await self._records.put_image(row)
        return image

    async def _clean(self) -> None:
        try:
            await self.collect()
        except AgentEnvError as error:
            log.warning("what is not needed any more is not removed now: %s", error.message)

    async def pull_remote(self, text: str, login: Credentials | None = None) -> Image:
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
            return _image(row) if row else await self.pull(text, login=login)

    async def _stored(self, image_id: str, lease: Lease) -> ImageRow | None:
        """The image as another node made it, if all it needs is there; it stays from now on."""
        key = f"image/{image_id}"
        await lease.use([key])
        data = await self.layers.objects.get(key, MAX_IMAGE)
        if data is None:
            return None
        row = _parsed(data)
        if row is None or row.id != image_id:
            return None  # of another version, or damaged: made again
        await lease.use(row.doc["keys"])
        for needed in row.doc["keys"]:
            kind, _, name = needed.partition("/")
            if kind == "first-use":
                continue  # worth having, not needed
            there = self.layers.stays(name, lease) if kind == "layer" else self._there(needed)
            if not await there:
                return None
        return row

    async def _there(self, key: str) -> bool:
        return await self.layers.objects.head(key) is not None

    async def _store_layers(
        self, source: ImageSource, lease: Lease, report: Report
    ) -> dict[str, Part]:
        unique = {layer.diff_id: layer for layer in source.layers}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    diff_id: group.create_task(self._store_layer(source, layer, lease, report))
                    for diff_id, layer in unique.items()
                }
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return {diff_id: task.result() for diff_id, task in tasks.items()}

    async def _store_layer(
        self, source: ImageSource, layer: SourceLayer, lease: Lease, report: Report
    ) -> Part:
        name = convert.layer_name(layer.diff_id)
        async with file_lock(self._lock, name):
            part = await self.layers.source(name, lease)
            if part and await self._there(f"tree/{name}"):
                report(layer.digest, "exists", layer.size, layer.size)
                return part
            async with self._fetches, source.blob(layer, report) as open_blob:
                done = 0

                def advance(count: int) -> None:
                    nonlocal done
                    done += count
                    report(layer.digest, "convert", done, layer.size)

                async with self._conversions:
                    part = await convert.convert(
                        self.layers, layer.diff_id, open_blob, advance, lease
                    )
            report(layer.digest, "done", layer.size, layer.size)
            return part

    async def _make(
        self, reference: str, source: ImageSource, made: dict[str, Part], lease: Lease
    ) -> ImageRow:
        diff_ids = tuple(layer.diff_id for layer in source.layers)
        name = convert.meta_name(diff_ids)
        async with file_lock(self._lock, name):
            meta = await self.layers.source(name, lease)
            if meta is None:
                meta = await convert.write_metadata(self.layers, diff_ids, lease)
        parts = [meta, *(made[diff_id] for diff_id in diff_ids)]
        names = [convert.layer_name(diff_id) for diff_id in diff_ids]
        found = image_id(reference, source.digest)
        keys = [
            *(f"layer/{part.layer}" for part in parts if part.layer),
            *(f"tree/{name}" for name in names),
            *(f"source/{name}" for name in (name, *names)),
        ]
        doc: dict[str, Any] = {
            "reference": reference,
            "digest": source.digest,
            "config": asdict(source.config),
            "diff_ids": list(diff_ids),
            "layers": [asdict(layer) for layer in source.layers],
            "parts": [asdict(part) for part in parts],
            "keys": [*dict.fromkeys(keys), f"image/{found}", first_use_key(found)],
        }
        await lease.use(doc["keys"])
        await self.layers.objects.put(f"image/{found}", json.dumps(doc).encode())
        return _row(doc)

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

    async def stored(self) -> list[Image]:
        """Every image in the store, whoever pulled it. Raises InfraError."""
        images: list[Image] = []
        for entry in await self.layers.objects.list("image/"):
            data = await self.layers.objects.get(entry.key, MAX_IMAGE)
            if row := _parsed(data or b""):
                made = datetime.fromtimestamp(entry.modified, UTC)
                images.append(_image(replace(row, created=made)))
        return images

    async def remove(self, image_id: str) -> None:
        """Forget an image and delete what no other needs. Raises NotFound, Conflict if in use."""
        image = await self.find(image_id)
        await self._records.drop_image(image.id)
        await self._claims.drop(image.id)
        await self._clean()

    async def sweep(self) -> int:
        """Remove drafts whose writer died, and claims of images that nobody remembers; how many
        drafts."""
        drafts = await self.layers.drafts.sweep()
        async with try_file_lock(self._lock, LOCK) as alone:
            if alone:  # no pull of ours is between its claim and its record
                known = {row.id for row in await self._records.images()}
                for claim in await self._claims.own("image"):
                    if claim not in known:
                        await self._claims.drop(claim)
        return drafts

    async def collect(self) -> int:
        """Delete what nothing in the store refers to, and drafts whose writer died; how many."""
        return await self.sweep() + len((await self.collection.run()).deleted)


def first_use_key(image_id: str) -> str:
    """Where the store has what a start of the image reads first, if it is known."""
    return f"first-use/{image_id}"


def image_id(reference: str, digest: str) -> str:
    """The same on every node."""
    return hashlib.sha256(f"{reference}\n{digest}".encode()).hexdigest()[:ID_LENGTH]


def _row(doc: dict[str, Any]) -> ImageRow:
    reference, digest = doc["reference"], doc["digest"]
    return ImageRow(image_id(reference, digest), reference, digest, datetime.now(UTC), doc)


def _parsed(data: bytes) -> ImageRow | None:
    """An image's record in the store; None if it is none of ours, or does not name all it needs."""
    try:
        row = _row(_RECORD.validate_json(data))
        image = _image(row)
        keys = _NAMES.validate_python(row.doc["keys"])
        names = _NAMES.validate_python([row.reference, row.digest, *row.doc["diff_ids"]])
    except (ValidationError, KeyError, TypeError, ImageError):
        return None
    layers = {f"layer/{part.layer}" for part in image.parts if part.layer}
    fits = len(image.parts) == len(image.diff_ids) + 1
    return row if names and fits and layers <= set(keys) else None


def _image(row: ImageRow) -> Image:
    doc: dict[str, Any] = row.doc
    try:
        found = _CONFIG.validate_python(doc["config"])
        parts = _PARTS.validate_python(doc["parts"])
    except (ValidationError, KeyError, TypeError) as error:
        raise ImageError(
            f"the record of image {row.id} is of another version", why=str(error),
            fix="pull it again", code="image_incomplete",
        ) from error  # fmt: skip
    size = sum(part.blocks for part in parts) * BLOCK
    return Image(
        row.id, row.reference, row.digest, row.created, found, tuple(doc["diff_ids"]), parts, size
    )
