"""One machine: the sandboxes it runs, found again after a restart, ended at their deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from agentenv.concurrency import KeyedLocks, Tasks, detached
from agentenv.config import Config
from agentenv.errors import Conflict, InfraError, NotFound, UserError
from agentenv.layer.catalog import ImageCatalog
from agentenv.model import ImageConfig, Resources, new_id
from agentenv.node.block_server import BlockServer
from agentenv.node.ground import NodeGround
from agentenv.node.metrics import MetricsStore, Sampler
from agentenv.sandbox.network import Policy
from agentenv.sandbox.record import Guest, Idempotency, NewSandbox, SandboxInfo, from_row
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
        self,
        config: Config,
        records: Records,
        catalog: ImageCatalog,
        ground: NodeGround,
        block_server: BlockServer,
    ) -> None:
        self.config, self.records, self.catalog, self.ground = config, records, catalog, ground
        self.block_server = block_server
        self.id = config.tag
        self._tasks = Tasks()
        self._boots = asyncio.Semaphore(BOOTS_PER_CPU * (os.cpu_count() or 1))
        self._live: dict[str, Sandbox] = {}
        self._keys = KeyedLocks()
        self._spent_keys: dict[str, Idempotency] = {}
        self.metrics = MetricsStore(config.home / "metrics")

    async def start(self, *, storage_lost: bool = False) -> None:
        """Adopt what runs, undo what was half made, remove what nobody owns.

        With ``storage_lost`` what runs cannot read its disks any more, and ends.
        """
        rows = [from_row(row) for row in await self.records.sandboxes()]
        owned = {info.id: info for info in rows if info.state is not State.ENDED}
        for info in rows:
            if info.state is State.ENDED:
                self._spend_key(info)
        self.metrics.start({info.id for info in rows})
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
        self.block_server.watch(self._storage_back, self._storage_lost)
        if storage_lost:
            await self._storage_lost()
        await self._storage_back(set(self._live))  # while no server ran it may have come back
        self._tasks.start(self._purge(), "purge post-mortems")
        sampler = Sampler(self.metrics, lambda: list(self._live.values()))
        self._tasks.start(sampler.run(), "sample metrics")

    async def _storage_back(self, sandbox_ids: set[str]) -> None:
        """Let those go on that stopped because their reads failed."""
        for sandbox in [self._live[each] for each in sandbox_ids if each in self._live]:
            try:
                await sandbox.proceed()
            except InfraError as error:
                log.warning("sandbox %s does not go on: %s", sandbox.id, error.message)

    async def _storage_lost(self) -> None:
        for sandbox in list(self._live.values()):
            await sandbox.kill("its storage was lost: block server and supervisor died together")

    async def close(self) -> bool:
        """Let go of everything; sandboxes run on. True if none does, so that nothing is left."""
        for sandbox in self._live.values():
            await sandbox.detach()
        await self._tasks.close()
        return not self._live

    async def create(self, request: NewSandbox) -> SandboxInfo:
        """A running sandbox. Raises NotFound for an unknown template, ImageError, GuestError,
        InfraError; on any of them nothing is left. Conflict: see ``_repeated``."""
        if request.idempotency is None:
            return await self._create(request)
        async with self._keys.hold(request.idempotency.key):
            return await self._repeated(request.idempotency) or await self._create(request)

    async def _repeated(self, wanted: Idempotency) -> SandboxInfo | None:
        """The sandbox that an earlier request with this key made, once it runs.

        Raises Conflict if that was another request, or its sandbox has ended since.
        """
        for sandbox in list(self._live.values()):
            earlier = sandbox.info.idempotency
            if earlier and earlier.key == wanted.key:
                _same_request(earlier, wanted)
                if await sandbox.settled():
                    return sandbox.info
        if earlier := self._spent_keys.get(wanted.key):
            _same_request(earlier, wanted)
            raise Conflict(
                "the sandbox that this idempotency key made has ended",
                fix="use a new key for a new sandbox",
                code="idempotency_key_used",
                state=str(State.ENDED),
            )
        return None

    async def _create(self, request: NewSandbox) -> SandboxInfo:
        template_id, build_id, alias, image_id = await self._resolve(request.template)
        resources = await self.resources(request)
        image = await self.catalog.find(image_id)
        now = utcnow()
        info = SandboxInfo(
            id=new_id(self.id[:NODE_PREFIX_LENGTH]),
            state=State.CREATING,
            template_id=template_id,
            build_id=build_id,
            image_id=image_id,
            started_at=now,
            end_at=now + timedelta(seconds=request.timeout or self.config.sandbox_timeout),
            resources=resources,
            guest=guest_of(image.config, request.env),
            alias=alias,
            access_token=secrets.token_hex(32) if request.secure else None,
            traffic_token=None if request.network.public else secrets.token_hex(32),
            network=request.network,
            idempotency=request.idempotency,
            metadata=request.metadata,
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
            if build.image_id is None:
                raise NotFound(f"template '{key}' has no image", code="template_not_found")
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

    async def resources(self, request: NewSandbox) -> Resources:
        """The size of a sandbox; what the request leaves open is the node's. Raises UserError."""
        capabilities = await self.ground.engine.capabilities()
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        memory = request.memory_mib or self.config.memory_mib
        if memory > total * MAX_MEMORY_SHARE:
            raise UserError(
                f"{memory} MiB of memory are more than this node has",
                why=f"it has {total} MiB",
                code="too_large",
            )
        cpus = request.vcpus or self.config.vcpus or capabilities.default_vcpus
        return Resources(cpus, memory, request.disk_mib or self.config.disk_mib)

    def list(self) -> list[SandboxInfo]:
        return [sandbox.info for sandbox in self._live.values()]

    async def find(self, sandbox_id: str) -> Sandbox:
        """Raises NotFound (``sandbox_not_found``) if it is unknown or has ended, saying why."""
        found = self._live.get(sandbox_id)
        if found is None or found.info.state is not State.RUNNING:
            raise await self._absent(sandbox_id)
        return found

    async def _absent(self, sandbox_id: str) -> NotFound:
        row = await self.records.sandbox(sandbox_id)
        return not_found(sandbox_id, from_row(row) if row else None)

    async def kill(self, sandbox_id: str) -> None:
        found = self._live.get(sandbox_id)
        if found is None or not await detached(self._tasks, found.kill(), f"kill {sandbox_id}"):
            raise await self._absent(sandbox_id)

    async def set_network(self, sandbox_id: str, change: Callable[[Policy], Policy]) -> None:
        work = (await self.find(sandbox_id)).set_network(change)
        await detached(self._tasks, work, f"network {sandbox_id}")

    async def set_deadline(
        self, sandbox_id: str, seconds: float, *, only_extend: bool = False
    ) -> SandboxInfo:
        work = (await self.find(sandbox_id)).set_deadline(seconds, only_extend=only_extend)
        return await detached(self._tasks, work, f"deadline {sandbox_id}")

    async def inspect(self, sandbox_id: str) -> tuple[SandboxInfo, dict[str, Any]]:
        """The record and host objects, also of one that ended lately."""
        if live := self._live.get(sandbox_id):
            return live.info, {**live.objects(), **self.block_server.objects(sandbox_id)}
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
        self._spend_key(sandbox.info)

    def _spend_key(self, info: SandboxInfo) -> None:
        # A creation that failed made nothing: its request may be sent again.
        if info.idempotency and not info.failed_creation:
            self._spent_keys[info.idempotency.key] = info.idempotency

    async def _purge(self) -> None:
        while True:
            try:
                for row in await self.records.sandboxes():
                    if row.state == State.ENDED and utcnow() - row.end_at > POST_MORTEM_KEPT:
                        await self.records.drop_sandbox(row.id)
                        self.metrics.forget(row.id)
                        if key := from_row(row).idempotency:
                            self._spent_keys.pop(key.key, None)
            except InfraError as error:
                log.warning("post-mortems are not purged now: %s", error.message)
            await asyncio.sleep(PURGE_INTERVAL)


def guest_of(image: ImageConfig, env: dict[str, str]) -> Guest:
    """What the image says of its processes, with the request's variables on top."""
    own = dict(pair.split("=", 1) for pair in image.env if "=" in pair)
    return Guest({**own, **env}, image.user or None, image.working_dir or None, image.volumes)


def _same_request(earlier: Idempotency, wanted: Idempotency) -> None:
    if earlier.request != wanted.request:
        raise Conflict(
            "this idempotency key came with another request before",
            fix="use a new key for a new request",
            code="idempotency_mismatch",
        )


def not_found(sandbox_id: str, ended: SandboxInfo | None = None) -> NotFound:
    """``ended``: what is known of it, if it lived lately."""
    cause = ended.cause if ended else None
    details: dict[str, Any] = {}
    if ended and cause:
        details = {"state": str(ended.state), "endedAt": ended.end_at, "cause": asdict(cause)}
    return NotFound(
        f"sandbox '{sandbox_id}' not found",
        why=f"it has ended: {cause.reason}" if cause else "",
        code="sandbox_not_found",
        **details,
    )
