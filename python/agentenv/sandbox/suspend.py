"""From a running machine to a snapshot: its processes stop, its pages and disk are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from agentenv.engine.contract import ControlChannel, Engine, Machine, Saved, SavePlan
from agentenv.errors import GuestError
from agentenv.layer.layers import BLOCK
from agentenv.model import new_id
from agentenv.sandbox import agent, launch
from agentenv.sandbox.ground import Ground
from agentenv.sandbox.record import SandboxInfo
from agentenv.snapshot.manifest import Element, Manifest, Stack, pack

log = logging.getLogger(__name__)

# A disk that a machine is given; before it, the id of the snapshot of the disk that lies below.
_NEXT = ".next"
FS_DEADLINE = 60.0  # seconds; a freeze writes what is dirty


@dataclass(frozen=True, slots=True)
class How:
    """``memory``: with the machine's memory, else its disk alone. ``healthy``: a guest that does
    not answer is not saved."""

    memory: bool = True
    healthy: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A running sandbox to be saved."""

    ground: Ground
    info: SandboxInfo
    machine: Machine
    control: ControlChannel

    @property
    def disk(self) -> Path:
        return launch.disk_of(self.ground, self.info)

    @property
    def engine(self) -> Engine:
        return self.ground.engine(self.info.engine)

    @property
    def layered(self) -> bool:
        return self.engine.traits.layered

    def saving(self, wanted: How) -> How:
        """What is saved: a disk that is part of memory only together with it, whatever is to be
        restored of the two."""
        return wanted if self.layered else replace(wanted, memory=True)


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot to be recorded. ``silent``: the guest did not answer."""

    manifest: Manifest
    silent: bool


@asynccontextmanager
async def paused(source: Source, how: How) -> AsyncGenerator[Taken]:
    """Save a machine that will not go on: it stands still in the block, which records the snapshot.

    If it cannot be saved, or the block fails, it runs as before. Raises GuestError
    (``sandbox_snapshot_guest_agent_unresponsive``), InfraError.
    """
    how, fresh = source.saving(how), not how.memory
    silent = await _quiet(source.control, how)
    try:
        with source.ground.snapshots.raws.making(2) as (memory, disk):
            raws = source.ground.snapshots.raws
            saved = await source.machine.save(SavePlan(_memory_file(source, how, memory)))
            if source.layered:
                await raws.take_disk(source.disk, disk)
            if how.memory:
                raws.put_runs(memory, (await saved.write()).runs)
            _note(source, saved)
            disks = await disk_stack(source, disk)
            manifest = await _manifest(source, saved.state, memory if how.memory else None, disks)
            yield Taken(replace(manifest, fresh=fresh), silent)
    except BaseException:
        await asyncio.shield(_go_on(source, how))
        raise


async def snapshot(
    source: Source, how: How, sealed: Callable[[Manifest], Awaitable[None]]
) -> Manifest:
    """Save a machine that goes on, and record the snapshot.

    ``sealed`` is told the disk that it lies over from then on, whatever becomes of the rest; what
    fails before that is for ``mend``. Raises as ``paused``.
    """
    ground, raws = source.ground, source.ground.snapshots.raws
    how, fresh = source.saving(how), not how.memory
    await _quiet(source.control, how)
    try:
        with raws.making(2) as (memory, disk):
            following = await _next_disk(source) if source.layered else None
            plan = SavePlan(_memory_file(source, how, memory), following)
            saved = await source.machine.save(plan)
            await _thaw(source.control, how)
            disks = await _lie_over(source, disk, following, sealed) if following else ()
            if how.memory:
                raws.put_runs(memory, (await saved.write()).runs)
            _note(source, saved)
            made = await _manifest(source, saved.state, memory if how.memory else None, disks)
            made = replace(made, fresh=fresh)
            await ground.snapshots.add(made)
            return made
    except BaseException:
        await asyncio.shield(_go_on(source, how))
        raise


async def mend(source: Source, sealed: Callable[[Manifest], Awaitable[None]]) -> None:
    """Finish what a snapshot began that failed, or whose server died: the machine may write to a
    new disk already. Raises InfraError."""
    for fresh in source.disk.parent.glob(f"*{_NEXT}"):
        if not await source.machine.writes(fresh):
            fresh.unlink()
        elif fresh.stem == source.info.disk_id:
            fresh.replace(source.disk)
        else:
            with source.ground.snapshots.raws.making(1) as (disk,):
                await _lie_over(source, disk, fresh, sealed)


async def _lie_over(
    source: Source, raw: str, fresh: Path, sealed: Callable[[Manifest], Awaitable[None]]
) -> Stack:
    """The machine writes to ``fresh``: record what lies below it. The file takes its place last,
    so that until then it tells that this is not done."""
    await source.ground.snapshots.raws.take_disk(source.disk, raw)
    disks = await disk_stack(source, raw)
    await sealed(replace(await _manifest(source, b"", None, disks), id=fresh.stem))
    fresh.replace(source.disk)
    return disks


async def _quiet(control: ControlChannel, how: How) -> bool:
    """Stop the guest's processes, and its disk if that is all to be saved; True if it is silent."""
    try:
        with_all = await agent.suspend(control)
        if not with_all:
            log.warning("not every process of the guest stopped in time")
        if not how.memory:
            await control.call("freeze", timeout=FS_DEADLINE)
    except GuestError as error:
        if error.code != "guest_unresponsive" or how.healthy or not how.memory:
            await _thaw(control, how)
            raise GuestError(
                "the guest does not answer, so it is not saved",
                why=error.message,
                code="sandbox_snapshot_guest_agent_unresponsive",
                http_status=409,
            ) from error
        return True
    return False


def _memory_file(source: Source, how: How, raw: str) -> Path | None:
    size = source.info.resources.memory_mib << 20
    return source.ground.snapshots.raws.make_memory(raw, size) if how.memory else None


async def _next_disk(source: Source) -> Path:
    assert source.info.slot is not None
    fresh = source.disk.with_name(new_id() + _NEXT)
    uid = source.ground.place(source.info.slot).uid
    await source.engine.make_disk(fresh, source.info.resources.disk_mib, uid)
    return fresh


def _note(source: Source, saved: Saved) -> None:
    source.info.phases.update({f"save.{name}": took for name, took in saved.phases.items()})


async def disk_stack(source: Source, raw: str) -> Stack:
    """What the machine's disk lay over, and that disk; nothing if it is part of its memory."""
    ground, info = source.ground, source.info
    if not source.layered:
        return ()
    blocks = (info.resources.disk_mib << 20) // BLOCK
    if info.disk_id is not None:
        below = (await ground.snapshots.find(info.disk_id)).disk
    else:
        blank = await ground.blank(info.resources.disk_mib)
        below = (Element(blank.blocks, blank.layer),)
    return (*below, Element(blocks, raw=raw))


async def _manifest(source: Source, state: bytes, memory: str | None, disk: Stack) -> Manifest:
    ground, info = source.ground, source.info
    stack: Stack | None = None
    if memory:
        below: Stack = ()
        blocks = (info.resources.memory_mib << 20) // BLOCK
        if not source.layered:
            blocks = -(-ground.snapshots.raws.memory(memory).stat().st_size // BLOCK)
        elif info.restore and info.snapshot_id:
            below = (await ground.snapshots.find(info.snapshot_id)).memory or ()
        stack = (*below, Element(blocks, raw=memory))
    return Manifest(
        id=new_id(),
        created=datetime.now(UTC),
        sandbox_id=info.id,
        parent=info.snapshot_id,
        image_id=info.image_id,
        resources=info.resources,
        guest=info.guest,
        features=asdict(await source.engine.features()),
        disk=disk,
        memory=stack,
        state=pack(state) if memory else "",
    )


async def _thaw(control: ControlChannel, how: How) -> None:
    if how.memory:
        with suppress(GuestError):  # a guest that was silent before
            await agent.release(control)
    else:
        await go_on(control)


async def go_on(control: ControlChannel) -> None:
    """Let disk and processes of a guest go on, whatever was stopped; unless it is silent."""
    try:
        await control.call("thaw", timeout=agent.INIT_DEADLINE)
    except GuestError as error:
        if error.code == "guest_unresponsive":
            return
    with suppress(GuestError):
        await agent.release(control)


async def _go_on(source: Source, how: How) -> None:
    try:
        await source.machine.go_on()
    finally:
        await _thaw(source.control, how)
