"""What stages begin with: images, pulled when they are not here, and templates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from agentenv.errors import NotFound, UserError
from agentenv.image.credentials import Credentials
from agentenv.layer.catalog import ImageCatalog
from agentenv.model import Guest, ImageConfig
from agentenv.store.records import BuildRow, Records
from agentenv.template.build import Foundation, Founded, Size
from agentenv.template.fold import State, state_of_guest, state_of_image
from agentenv.template.journal import Journal
from agentenv.template.named import (
    engine_of_build,
    find_build,
    guest_of_build,
    resources_of_build,
)
from agentenv.template.recipe import Base, Origin, Recipe

Login = Credentials
# E2B's own base image is what `base` is here.
E2B_BASE = ("e2bdev/base", "e2bdev/base:latest")
BASE_TEMPLATE = "base"


class Bases:
    """``sizes`` completes what was asked for with the node's defaults, and refuses what is too
    large."""

    def __init__(
        self,
        records: Records,
        catalog: ImageCatalog,
        sizes: Callable[[Mapping[str, Any]], Awaitable[Size]],
    ) -> None:
        self._records, self._catalog, self._sizes = records, catalog, sizes

    async def size(self, plan: Recipe, asked: Mapping[str, Any]) -> Size:
        """A template made from another has its size where none is asked for, and its engine and
        disk's size anyway.

        Raises UserError.
        """
        base = plan.final.base
        found = None
        if base.kind in (Origin.TEMPLATE, Origin.NAME):
            found = await find_build(self._records, base.name)
        inherited = resources_of_build(found[1]) if found else None
        if found is None or inherited is None:
            return await self._sizes(asked)
        sizes = {"engine": engine_of_build(found[1]), **asdict(inherited), **asked}
        sizes.pop("free_mib", None)
        return await self._sizes({**sizes, "disk_mib": inherited.disk_mib})

    def finder(self, login: Login | None, journal: Journal) -> Founded:
        async def found(base: Base, provision: bool) -> Foundation:
            return await self._find(base, provision, login, journal)

        return found

    async def _find(
        self, base: Base, provision: bool, login: Login | None, journal: Journal
    ) -> Foundation:
        if base.kind is not Origin.IMAGE or base.name in E2B_BASE:
            name = BASE_TEMPLATE if base.name in E2B_BASE else base.name
            if found := await find_build(self._records, name):
                return await self._of_build(found[1], provision)
            if base.kind is Origin.TEMPLATE:
                raise NotFound(f"template '{name}' not found", code="template_not_found")
        if await self._records.image(base.name) is None:
            journal.add("info", f"pulling {base.name}", "base")
        image = await self._catalog.pull_remote(base.name, login)
        return self._of_image(image.id, image.config, provision)

    async def _of_build(self, row: BuildRow, provision: bool) -> Foundation:
        if row.snapshot_id is not None:
            guest = guest_of_build(row) or Guest()
            config: dict[str, Any] = row.doc.get("config", {})
            return Foundation(None, row.snapshot_id, state_of_guest(guest), row.id, config)
        if row.image_id is None:
            raise UserError(f"build {row.id} is {row.status}", code="template_not_ready")
        image = await self._catalog.find(row.image_id)
        return self._of_image(image.id, image.config, provision)

    @staticmethod
    def _of_image(image_id: str, config: ImageConfig, provision: bool) -> Foundation:
        state: State = state_of_image(config, provision=provision)
        return Foundation(image_id, None, state, image_id, asdict(config))
