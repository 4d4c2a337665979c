"""A home's records, images and layers, over the store it belongs to.

What a home needs of its store it claims under an id of its own. The id belongs to one folder on one
machine: a copy of the home (a machine's image, a restored backup) takes another, or each would take
the other's claims for its own and drop them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agentenv.config import STORE_NOTE, Config
from agentenv.errors import InfraError, UserError, faults
from agentenv.host.files import file_lock
from agentenv.image.registry import RegistrySettings
from agentenv.layer.blockd import BlockClient
from agentenv.layer.catalog import ImageCatalog
from agentenv.layer.layers import Layers
from agentenv.model import new_id
from agentenv.store.claims import Claims
from agentenv.store.collection import Collection
from agentenv.store.drafts import Drafts
from agentenv.store.objects import CoreObjects, open_objects
from agentenv.store.sql import SqlRecords

FOLDER_MODE = 0o711  # engines run as users of their own and pass through
MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True, slots=True)
class Library:
    """Records, images and layers of a home."""

    records: SqlRecords
    catalog: ImageCatalog
    layers: Layers
    claims: Claims
    collection: Collection
    blocks: BlockClient


@asynccontextmanager
async def open_library(config: Config) -> AsyncGenerator[Library]:
    """For the CLI too, with or without a server.

    Raises InfraError (``state_format``, ``store_missing``, …), UserError (``invalid_store``,
    ``store_differs``).
    """
    home = config.home
    home.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    records = await SqlRecords.open_sqlite(home / "state.db")
    try:
        objects = await _open_store(config, records)
        drafts = Drafts(home / "drafts")
        layers = Layers(objects, records.chunks, drafts, home / "cache")
        claims = await _own_claims(home, objects, records)
        collection = Collection(objects, records.chunks, drafts)
        settings = RegistrySettings(config.registry_mirrors, config.insecure_registries)
        catalog = ImageCatalog(home, layers, records, claims, collection, settings)
        blocks = BlockClient(config.runtime_dir / "blockd.sock", config.runtime_dir / "blocks")
        yield Library(records, catalog, layers, claims, collection, blocks)
    finally:
        await records.close()


async def _open_store(config: Config, records: SqlRecords) -> CoreObjects:
    """The store of this home, which is the same for every verb and at every start."""
    url, note = config.store_url, config.home / STORE_NOTE
    used = bool(await records.images())
    known = note.read_text().strip() if note.is_file() else str(config.home / "store")
    if used and _place(url) != _place(known):
        raise UserError(
            f"the images of this home are not in {_place(url)}",
            why=f"they are in {_place(known)}",
            fix=f"use another --home, or write the place they were moved to into {note}",
            code="store_differs",
        )
    if used and url.startswith("/") and not Path(url).is_dir():
        raise InfraError(
            f"the store's folder {url} is gone",
            fix="mount its disk, or bring it back",
            code="store_missing",
        )
    objects = await open_objects(url)
    if url != known:
        with faults("the home's store could not be noted"):
            note.write_text(url + "\n")
    return objects


def _place(url: str) -> str:
    """A store without its options, which may change."""
    return url.partition("?")[0].removeprefix("file://").rstrip("/")


async def _own_claims(home: Path, objects: CoreObjects, records: SqlRecords) -> Claims:
    async with file_lock(home / "images.lock", "home-id"):
        found, fresh = _identity(home)
        claims = Claims(objects, found)
        if fresh:
            for row in await records.images():  # those of the home this one was copied from
                await claims.put(row.id, row.doc["keys"])
            for blank in (home / "engine").glob("blank-*.json"):
                blank.unlink()
            _write_identity(home, found)
    return claims


def _identity(home: Path) -> tuple[str, bool]:
    """The home's id, and whether it is a new one."""
    with suppress(FileNotFoundError, ValueError):
        found, place = (home / "home-id").read_text().split()
        if place == _where(home):
            return found, False
    return new_id(), True


def _write_identity(home: Path, found: str) -> None:
    with faults("the home's id could not be written"):
        draft = home / ".home-id"
        draft.write_text(f"{found} {_where(home)}\n")
        draft.rename(home / "home-id")


def _where(home: Path) -> str:
    machine = MACHINE_ID.read_text().strip() if MACHINE_ID.is_file() else "-"
    return f"{machine}:{home.stat().st_ino}"
