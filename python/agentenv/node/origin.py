"""What the word for a template means, and what a sandbox made from it cannot choose any more."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from agentenv.concurrency import Tasks, detached
from agentenv.config import AUTO
from agentenv.errors import Conflict, NotFound, UserError
from agentenv.layer.catalog import ImageCatalog
from agentenv.model import SANDBOX_ID, Guest, ImageConfig, Resources
from agentenv.sandbox.record import NewSandbox
from agentenv.snapshot.manifest import Manifest
from agentenv.snapshot.repository import Snapshots
from agentenv.store.records import READY, Records
from agentenv.template.named import find_build, guest_of_build
from agentenv.template.names import means_image
from agentenv.template.shipped.recipes import SHIPPED


@dataclass(frozen=True, slots=True)
class Origin:
    """What a sandbox is made from. ``guest``: instead of what the snapshot was saved with."""

    template_id: str
    build_id: str
    alias: str | None
    image_id: str | None
    snapshot_id: str | None = None
    guest: Guest | None = None


class Origins:
    """``tasks``: an image that is pulled is pulled to its end."""

    def __init__(
        self, records: Records, catalog: ImageCatalog, snapshots: Snapshots, tasks: Tasks
    ) -> None:
        self._records, self._catalog, self._snapshots = records, catalog, snapshots
        self._tasks = tasks

    async def resolve(self, key: str) -> Origin:
        """What ``key`` means. Raises NotFound, Conflict (``template_not_ready``)."""
        if found := await find_build(self._records, key):
            template, build = found
            if build.status != READY or not (build.image_id or build.snapshot_id):
                raise Conflict(
                    f"template '{key}' cannot be used",
                    why=f"its build is {build.status}",
                    code="template_not_ready",
                )
            alias = template.names[0] if template.names else None
            guest = guest_of_build(build)
            return Origin(template.id, build.id, alias, build.image_id, build.snapshot_id, guest)
        if await self._is_snapshot(key):
            return Origin(key, "", None, None, key)
        if not means_image(key):
            raise NotFound(
                f"template '{key}' not found",
                fix=_remedy(key),
                code="template_not_found",
            )
        known = await self._records.image(key)
        if known is None:
            image = await detached(self._tasks, self._catalog.pull_remote(key), f"pull {key}")
            return Origin(image.id, "", None, image.id)
        return Origin(known.id, "", None, known.id)

    async def _is_snapshot(self, key: str) -> bool:
        """Of this node, or of another that shares the store."""
        if not SANDBOX_ID.match(key):
            return False
        try:
            await self._snapshots.find(key)
        except NotFound:
            return False
        return True


def _remedy(key: str) -> str:
    shipped = key.partition(":")[0] in SHIPPED
    return "aenv template init" if shipped else f"name an image: aenv image pull IMAGE --name {key}"


def fixed_size(request: NewSandbox, manifest: Manifest) -> Resources:
    """A snapshot's sizes are what they are. Raises UserError for others."""
    made = manifest.resources
    wanted = (request.vcpus, request.memory_mib, request.disk_mib)
    for name, asked, has in zip(
        ("cpuCount", "memoryMB", "diskSizeMB"), wanted, astuple(made), strict=True
    ):
        if asked is not None and asked != has:
            raise UserError(
                f"{name} cannot be {asked}",
                why=f"the template was saved with {has}",
                fix="leave it out, or build the template with it",
                code="fixed_by_template",
            )
    return made


def made_by(manifest: Manifest, asked: str | None) -> str:
    """The engine that saved it, which alone can go on with it. Raises UserError
    (``fixed_by_template``) if another one is asked for."""
    engine = manifest.engine
    if asked not in (None, AUTO, engine):
        raise UserError(
            f"engine cannot be {asked}",
            why=f"the template was saved by {engine}",
            fix=f"leave it out, or build it anew from an image with the engine {asked} "
            "(a template that it is built from must be that engine's, too; for the shipped ones: "
            f"aenv template init --engine {asked})",
            code="fixed_by_template",
        )
    return engine


def guest_of(image: ImageConfig, env: dict[str, str]) -> Guest:
    """What the image says of its processes, with the request's variables on top."""
    own = dict(pair.split("=", 1) for pair in image.env if "=" in pair)
    return Guest({**own, **env}, image.user or None, image.working_dir or None, image.volumes)
