"""One machine: the sandboxes it runs, found again after a restart, ended at their deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from agentenv.concurrency import KeyedLocks, Tasks, detached
from agentenv.config import Config
from agentenv.errors import Conflict, InfraError, NotFound, UserError
from agentenv.layer.catalog import ImageCatalog
from agentenv.model import Resources, new_id
from agentenv.node.block_server import BlockServer
from agentenv.node.ground import NodeGround
from agentenv.node.metrics import MetricsStore, Sampler
from agentenv.node.origin import Origin, Origins, fixed_size, guest_of, made_by
from agentenv.sandbox.network import Policy
from agentenv.sandbox.record import Idempotency, NewSandbox, SandboxInfo, from_row
from agentenv.sandbox.sandbox import Sandbox, utcnow
from agentenv.sandbox.state import State
from agentenv.sandbox.suspend import How
from agentenv.snapshot.manifest import Manifest
from agentenv.store.records import Records, SandboxRow

log = logging.getLogger(__name__)

# A boot keeps about one core busy under emulation; more at once only make all of them late.
BOOTS_PER_CPU = 2
RESTORES_PER_CPU = 8
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
        self._origins = Origins(records, catalog, ground.snapshots, self._tasks)
        self._boots = asyncio.Semaphore(BOOTS_PER_CPU * (os.cpu_count() or 1))
        self._restores = asyncio.Semaphore(RESTORES_PER_CPU * (os.cpu_count() or 1))
        self._live: dict[str, Sandbox] = {}
        self._keys = KeyedLocks()
        self._spent_keys: dict[str, Idempotency] = {}
        self.metrics = MetricsStore(config.home / "metrics")

    async def start(self, *, storage_lost: bool = False, serve: bool = True) -> None:
        """Adopt what runs, undo what was half made, remove what nobody owns.

        With ``storage_lost`` what runs cannot read its disks any more, and ends.
        """
        rows = [info for row in await self.records.sandboxes() if (info := readable(row))]
        owned = {info.id: info for info in rows if info.state is not State.ENDED}
        for info in rows:
            if info.state is State.ENDED:
                self._spend_key(info)
        self.metrics.start({info.id for info in rows})
        await self.ground.reconcile(
            {info.slot for info in owned.values() if info.slot is not None},
            {info.machine for info in owned.values() if info.slot is not None},
            serve=serve,
        )
        if serve:
            await self.ground.snapshots.start()
        for info in owned.values():
            self._live[info.id] = Sandbox(self.ground, info, self._tasks, self._ended)
        adopted = await asyncio.gather(
            *(sandbox.adopt() for sandbox in list(self._live.values())), return_exceptions=True
        )
        for sandbox_id, outcome in zip(owned, adopted, strict=True):
            if isinstance(outcome, BaseException):
                log.error("sandbox %s could not be adopted", sandbox_id, exc_info=outcome)
        await self.ground.publish_all()
        if not serve:
            return
        self.block_server.watch(self._storage_back, self._storage_lost)
        if storage_lost:
            await self._storage_lost()
        await self._storage_back()  # while no server ran it may have come back
        self._tasks.start(self._purge(), "purge post-mortems")
        sampler = Sampler(self.metrics, lambda: list(self._live.values()))
        self._tasks.start(sampler.run(), "sample metrics")

    async def _storage_back(self, machines: set[str] | None = None) -> None:
        """Let those go on that stopped because their reads failed, or all that did."""
        for sandbox in list(self._live.values()):
            if machines is not None and sandbox.info.machine not in machines:
                continue
            try:
                await sandbox.proceed()
            except InfraError as error:
                log.warning("sandbox %s does not go on: %s", sandbox.id, error.message)

    async def _storage_lost(self) -> None:
        for sandbox in self.running():
            await sandbox.kill("its storage was lost: block server and supervisor died together")

    def running(self) -> Sequence[Sandbox]:
        """Those that hold anything of this machine."""
        return [sandbox for sandbox in self._live.values() if sandbox.info.slot is not None]

    async def close(self) -> bool:
        """Let go of everything; sandboxes run on. True if none does, so that nothing is left."""
        for sandbox in self._live.values():
            await sandbox.detach()
        await self._tasks.close()
        return not self.running()

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
        origin = await self._origins.resolve(request.template)
        if origin.snapshot_id is None:
            return await self._start(request, origin, None)
        async with self.ground.snapshots.held(origin.snapshot_id) as manifest:
            return await self._start(request, origin, manifest)

    async def _start(
        self, request: NewSandbox, origin: Origin, manifest: Manifest | None
    ) -> SandboxInfo:
        now = utcnow()
        if manifest:
            engine = made_by(manifest, request.engine)
            resources, image_id = fixed_size(request, manifest), manifest.image_id
            guest = origin.guest or manifest.guest
            guest = replace(guest, env={**guest.env, **request.env})
        else:
            assert origin.image_id is not None
            image_id, engine = origin.image_id, self.ground.engines.asked(request.engine)
            resources = await self.resources(request)
            guest = guest_of((await self.catalog.find(image_id)).config, request.env)
        info = SandboxInfo(
            id=self.new_id(),
            state=State.CREATING,
            template_id=origin.template_id,
            build_id=origin.build_id,
            image_id=image_id,
            snapshot_id=origin.snapshot_id,
            disk_id=origin.snapshot_id,
            started_at=now,
            end_at=now + timedelta(seconds=request.timeout or self.config.sandbox_timeout),
            resources=resources,
            guest=guest,
            engine=engine,
            alias=origin.alias,
            access_token=secrets.token_hex(32) if request.secure else None,
            traffic_token=None if request.network.public else secrets.token_hex(32),
            network=request.network,
            lifecycle=request.lifecycle,
            origin=origin.template_id if manifest else None,
            idempotency=request.idempotency,
            metadata=request.metadata,
        )
        return await self.bring_up(info)

    def new_id(self) -> str:
        return new_id(self.id[:NODE_PREFIX_LENGTH])

    async def bring_up(self, info: SandboxInfo) -> SandboxInfo:
        """Make the sandbox of this record, which is no sandbox's yet. Raises as ``create``."""
        sandbox = Sandbox(self.ground, info, self._tasks, self._ended)
        self._live[info.id] = sandbox
        work = sandbox.create(self._turns(info), self.config.boot_deadline)
        await detached(self._tasks, work, f"create {info.id}")
        return sandbox.info

    def _turns(self, info: SandboxInfo) -> asyncio.Semaphore:
        """A boot keeps a core busy for seconds, a restore for some 50 milliseconds."""
        return self._restores if info.snapshot_id else self._boots

    async def resources(self, request: NewSandbox) -> Resources:
        """The size of a sandbox; what the request leaves open is the node's. Raises UserError."""
        engine = self.ground.engine(self.ground.engines.asked(request.engine))
        capabilities = await engine.capabilities()
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
        if found is None or found.info.state.shown not in (State.RUNNING, State.PAUSED):
            raise await self._absent(sandbox_id)
        return found

    async def _absent(self, sandbox_id: str) -> NotFound:
        row = await self.records.sandbox(sandbox_id)
        return not_found(sandbox_id, from_row(row) if row else None)

    async def kill(self, sandbox_id: str) -> None:
        found = self._live.get(sandbox_id)
        if found is None and await self._drop_damaged(sandbox_id):
            return
        if found is None or not await detached(self._tasks, found.kill(), f"kill {sandbox_id}"):
            raise await self._absent(sandbox_id)

    async def _drop_damaged(self, sandbox_id: str) -> bool:
        """Nothing runs of a sandbox whose record cannot be read: the record is all of it."""
        row = await self.records.sandbox(sandbox_id)
        if row is None or readable(row):
            return False
        await self.records.drop_sandbox(sandbox_id)
        self.ground.snapshots.tidy()
        return True

    async def set_network(self, sandbox_id: str, change: Callable[[Policy], Policy]) -> None:
        work = (await self.find(sandbox_id)).set_network(change)
        await detached(self._tasks, work, f"network {sandbox_id}")

    async def set_deadline(self, sandbox_id: str, seconds: float) -> SandboxInfo:
        work = (await self.find(sandbox_id)).set_deadline(seconds)
        return await detached(self._tasks, work, f"deadline {sandbox_id}")

    async def pause(self, sandbox_id: str, how: How) -> None:
        """Raises NotFound, Conflict if it is paused already, GuestError, InfraError."""
        work = (await self.find(sandbox_id)).pause(how)
        await detached(self._tasks, work, f"pause {sandbox_id}")

    async def resume(
        self, sandbox_id: str, seconds: float | None, *, memory: bool = True
    ) -> tuple[SandboxInfo, bool]:
        """A running sandbox, and whether it was paused before. See ``Sandbox.resume``."""
        found = await self.find(sandbox_id)
        turns = self._restores if memory else self._boots
        work = found.resume(turns, self.config.boot_deadline, seconds, memory)
        resumed = await detached(self._tasks, work, f"resume {sandbox_id}")
        return found.info, resumed

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        """See ``Sandbox.rollback``; whose snapshot that may be is asked in ``node.rollback``."""
        found, manifest = await self.find(sandbox_id), self.ground.snapshots.known(snapshot_id)
        turns = self._restores if manifest and manifest.memory else self._boots
        work = found.rollback(turns, self.config.boot_deadline, snapshot_id)
        await detached(self._tasks, work, f"rollback {sandbox_id}")
        return found.info

    @asynccontextmanager
    async def taking(self, sandbox_id: str, how: How) -> AsyncGenerator[Manifest]:
        """A snapshot of a running sandbox; it stays if somebody needs it when the block ends.

        Raises as ``Sandbox.snapshot``.
        """
        work = (await self.find(sandbox_id)).snapshot(how)
        made = await detached(self._tasks, work, f"snapshot {sandbox_id}")
        async with self.ground.snapshots.held(made.id):
            yield made

    async def inspect(self, sandbox_id: str) -> tuple[SandboxInfo, dict[str, Any]]:
        """The record and host objects, also of one that ended lately."""
        if live := self._live.get(sandbox_id):
            machine = live.info.machine
            return live.info, {**live.objects(), **self.block_server.objects(machine)}
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
        self.ground.snapshots.tidy()  # its record needs none any more

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
                        info = readable(row)
                        if info and info.idempotency:
                            self._spent_keys.pop(info.idempotency.key, None)
            except InfraError as error:
                log.warning("post-mortems are not purged now: %s", error.message)
            await asyncio.sleep(PURGE_INTERVAL)


def readable(row: SandboxRow) -> SandboxInfo | None:
    """None for a damaged record, which must not keep those of others from their use."""
    try:
        return from_row(row)
    except InfraError as error:
        log.error("%s: %s", error.message, error.why)
        return None


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
