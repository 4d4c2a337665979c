"""One machine: the sandboxes it runs, found again after a restart, ended at their deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from agentenv.concurrency import Tasks, detached
from agentenv.config import Config
from agentenv.errors import InfraError, NotFound, UserError
from agentenv.layer.catalog import ImageCatalog
from agentenv.model import ImageConfig, Resources, new_id
from agentenv.node.ground import NodeGround
from agentenv.sandbox.record import Guest, SandboxInfo, from_row
from agentenv.sandbox.sandbox import Sandbox, utcnow
from agentenv.sandbox.state import State
from agentenv.store.records import Records
from agentenv.template.named import find_build
from agentenv.template.names import means_image

log = logging.getLogger(__name__)

# A boot keeps about one core busy under emulation; more at once only make all of them late.
BOOTS_PER_CPU = 2
POST_MORTEM_KEPT = timedelta(hours=1)
PURGE_INTERVAL = 60.0  # seconds
NODE_PREFIX_LENGTH = 4  # of a sandbox id: the node of its birth
MAX_MEMORY_SHARE = 0.9  # of the machine, for one sandbox


class Node:
    """Made by ``open``; every lifecycle call runs to its end even if its caller goes away."""

    def __init__(
        self, config: Config, records: Records, catalog: ImageCatalog, ground: NodeGround
    ) -> None:
        self.config, self.records, self.catalog, self.ground = config, records, catalog, ground
        self.id = config.tag
        self._tasks = Tasks()
        self._boots = asyncio.Semaphore(BOOTS_PER_CPU * (os.cpu_count() or 1))
        self._live: dict[str, Sandbox] = {}

    async def start(self) -> None:
        """Adopt what runs, undo what was half made, remove what nobody owns."""
        rows = [from_row(row) for row in await self.records.sandboxes()]
        owned = {info.id: info for info in rows if info.state is not State.ENDED}
        await self.ground.reconcile(
            {info.slot for info in owned.values() if info.slot is not None}, set(owned)
        )
        for info in owned.values():
            self._live[info.id] = Sandbox(self.ground, info, self._tasks, self._ended)
        adopted = await asyncio.gather(
            *(sandbox.adopt() for sandbox in list(self._live.values())), return_exceptions=True
        )
        for sandbox_id, outcome in zip(owned, adopted, strict=True):
            if isinstance(outcome, BaseException):
                log.error("sandbox %s could not be adopted", sandbox_id, exc_info=outcome)
        await self.ground.publish_all()
        self._tasks.start(self._purge(), "purge post-mortems")

    async def close(self) -> bool:
        """Let go of everything; sandboxes run on. True if none does, so that nothing is left."""
        for sandbox in self._live.values():
            await sandbox.detach()
        await self._tasks.close()
        return not self._live

    async def create(
        self,
        template: str,
        *,
        timeout: float | None,
        metadata: dict[str, str],
        env: dict[str, str],
        secure: bool,
        allow_internet: bool,
        vcpus: int | None,
        memory_mib: int | None,
        disk_mib: int | None,
    ) -> SandboxInfo:
        """A running sandbox. Raises NotFound for an unknown template, ImageError, GuestError,
        InfraError; on any of them nothing is left."""
        template_id, build_id, alias, image_id = await self._resolve(template)
        resources = await self._resources(vcpus, memory_mib, disk_mib)
        image = await self.catalog.find(image_id)
        now = utcnow()
        info = SandboxInfo(
            id=new_id(self.id[:NODE_PREFIX_LENGTH]),
            state=State.CREATING,
            template_id=template_id,
            build_id=build_id,
            image_id=image_id,
            started_at=now,
            end_at=now + timedelta(seconds=timeout or self.config.sandbox_timeout),
            resources=resources,
            guest=guest_of(image.config, env),
            alias=alias,
            access_token=secrets.token_hex(32) if secure else None,
            allow_internet=allow_internet,
            metadata=metadata,
        )
        sandbox = Sandbox(self.ground, info, self._tasks, self._ended)
        self._live[info.id] = sandbox
        work = sandbox.create(self._boots, self.config.boot_deadline)
        await detached(self._tasks, work, f"create {info.id}")
        return sandbox.info

    async def _resolve(self, key: str) -> tuple[str, str, str | None, str]:
        """Template id, build id, alias and image id of what ``key`` means."""
        if found := await find_build(self.records, key):
            template, build = found
            return template.id, build.id, template.names[0], build.image_id
        if not means_image(key):
            raise NotFound(
                f"template '{key}' not found",
                fix=f"name an image: aenv image pull IMAGE --name {key}",
                code="template_not_found",
            )
        known = await self.records.image(key)
        if known is None:
            image = await detached(self._tasks, self.catalog.pull_remote(key), f"pull {key}")
            return image.id, "", None, image.id
        return known.id, "", None, known.id

    async def _resources(
        self, vcpus: int | None, memory_mib: int | None, disk_mib: int | None
    ) -> Resources:
        capabilities = await self.ground.engine.capabilities()
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        memory = memory_mib or self.config.memory_mib
        if memory > total * MAX_MEMORY_SHARE:
            raise UserError(
                f"{memory} MiB of memory are more than this node has",
                why=f"it has {total} MiB",
                code="too_large",
            )
        cpus = vcpus or self.config.vcpus or capabilities.default_vcpus
        return Resources(cpus, memory, disk_mib or self.config.disk_mib)

    def list(self) -> list[SandboxInfo]:
        return [sandbox.info for sandbox in self._live.values()]

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """Raises NotFound (``sandbox_not_found``) if it is unknown or has ended."""
        found = self._live.get(sandbox_id)
        if found is None or found.info.state is not State.RUNNING:
            raise not_found(sandbox_id)
        return found

    async def kill(self, sandbox_id: str) -> None:
        found = self._live.get(sandbox_id)
        if found is None:
            raise not_found(sandbox_id)
        if not await detached(self._tasks, found.kill(), f"kill {sandbox_id}"):
            raise not_found(sandbox_id)

    async def set_deadline(
        self, sandbox_id: str, seconds: float, *, only_extend: bool = False
    ) -> SandboxInfo:
        work = self.sandbox(sandbox_id).set_deadline(seconds, only_extend=only_extend)
        return await detached(self._tasks, work, f"deadline {sandbox_id}")

    async def inspect(self, sandbox_id: str) -> tuple[SandboxInfo, dict[str, Any]]:
        """The record and host objects, also of one that ended lately."""
        if live := self._live.get(sandbox_id):
            return live.info, live.objects()
        row = await self.records.sandbox(sandbox_id)
        if row is None:
            raise not_found(sandbox_id)
        return from_row(row), {}

    async def console(self, sandbox_id: str, lines: int) -> Sequence[str]:
        if live := self._live.get(sandbox_id):
            return await asyncio.to_thread(live.console, lines)
        info, _ = await self.inspect(sandbox_id)
        return info.cause.console[-lines:] if info.cause else ()

    def _ended(self, sandbox: Sandbox) -> None:
        self._live.pop(sandbox.id, None)

    async def _purge(self) -> None:
        while True:
            try:
                for row in await self.records.sandboxes():
                    if row.state == State.ENDED and utcnow() - row.end_at > POST_MORTEM_KEPT:
                        await self.records.drop_sandbox(row.id)
            except InfraError as error:
                log.warning("post-mortems are not purged now: %s", error.message)
            await asyncio.sleep(PURGE_INTERVAL)


def guest_of(image: ImageConfig, env: dict[str, str]) -> Guest:
    """What the image says of its processes, with the request's variables on top."""
    own = dict(pair.split("=", 1) for pair in image.env if "=" in pair)
    return Guest({**own, **env}, image.user or None, image.working_dir or None, image.volumes)


def not_found(sandbox_id: str) -> NotFound:
    return NotFound(f"sandbox '{sandbox_id}' not found", code="sandbox_not_found")
