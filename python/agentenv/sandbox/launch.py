"""From a record to a running guest, and back to nothing.

``dismantle`` undoes whatever ``launch`` did, however far it came: it is the one
way a sandbox's objects go away, after a failure, a kill, a death or a crash of the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agentenv.concurrency import together
from agentenv.engine.contract import (
    ControlChannel,
    FlatSource,
    Limits,
    Machine,
    MachineSpec,
    Suspended,
)
from agentenv.errors import Conflict, GuestError, InfraError, faults
from agentenv.sandbox import agent
from agentenv.sandbox.ground import Ground, Place, Seat, Shape
from agentenv.sandbox.record import SandboxInfo, Verdict
from agentenv.snapshot.manifest import Manifest, misfit, unpack
from agentenv.snapshot.repository import Opened

log = logging.getLogger(__name__)

AGENT_USER_FOLDER_MODE = 0o700


@contextmanager
def phase(phases: dict[str, float], name: str) -> Generator[None]:
    """Record how long a step of creation took, in seconds."""
    begun = time.monotonic()
    yield
    phases[name] = round(time.monotonic() - begun, 6)


def machine_spec(
    ground: Ground, info: SandboxInfo, place: Place, parts: Parts | None = None
) -> MachineSpec:
    """What the engine runs for this sandbox; without parts, what it finds it again by."""
    spec = _waiting_spec(ground, info.machine, place, shape_of(ground, info))
    if parts is None:
        return spec
    return replace(spec, root=parts.root, disk_base=parts.disk_base, disk_below=parts.disk_below)


def shape_of(ground: Ground, info: SandboxInfo) -> Shape:
    """What its machine must be like. Raises Conflict (``engine_unavailable``)."""
    size = info.resources
    shape = Shape(info.engine, size.vcpus, size.memory_mib)
    if ground.engine(info.engine).traits.waits:
        return shape
    return replace(shape, image_id=info.image_id, disk_mib=size.disk_mib)


def _waiting_spec(ground: Ground, machine: str, place: Place, shape: Shape) -> MachineSpec:
    """A machine of this shape in this place, whatever it will be made from."""
    traits = ground.engine(shape.engine).traits
    vcpus, memory_mib = shape.vcpus, shape.memory_mib
    return MachineSpec(
        sandbox_id=machine,
        run_dir=ground.run_dir(machine),
        root=None,
        disk=ground.files(machine) / traits.disk_name,
        disk_base=None,
        vcpus=vcpus,
        memory_mib=memory_mib,
        network=place.attachment,
        uid=place.uid,
        gid=place.gid,
        cgroup=machine,
        limits=Limits(
            (memory_mib << 20) + traits.overhead,
            traits.pids,
            cpu_quota=None if traits.bounds_cpus else vcpus,
        ),
    )


def disk_of(ground: Ground, info: SandboxInfo) -> Path:
    """What the sandbox writes to."""
    return ground.files(info.machine) / ground.engine(info.engine).traits.disk_name


def objects(ground: Ground, info: SandboxInfo, slot: int) -> dict[str, object]:
    """What is held for its machine, but for the engine's own."""
    place = ground.place(slot)
    return {
        "slot": place.index,
        "netns": str(place.attachment.netns),
        "tap": place.attachment.tap,
        "uid": place.uid,
        "files": str(ground.files(info.machine)),
        "run_dir": str(ground.run_dir(info.machine)),
    }


@dataclass(frozen=True, slots=True)
class Parts:
    """What a machine is made from, open for it; no root where a waiting one has it."""

    root: FlatSource | None
    disk_base: Path | None
    disk_below: tuple[Path, ...] = ()
    memory_map: bytes = b""
    memory: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Running:
    """A machine whose guest was introduced; ``verdict`` if it was restored, not booted."""

    machine: Machine
    control: ControlChannel
    verdict: Verdict | None = None


async def launch(ground: Ground, info: SandboxInfo, seat: Seat, boot_deadline: float) -> Running:
    """Bring the guest up, from its snapshot if it has one; times go to ``info.phases``.

    Raises Conflict (``cannot_restore``), ImageError, GuestError, InfraError; then: ``dismantle``.
    """
    try:
        return await _launch(ground, info, seat, boot_deadline)
    except GuestError as error:
        # A guest whose reads wait does not answer, and cannot help it.
        if cause := ground.storage_fault(info.machine):
            raise InfraError(
                "the sandbox's storage does not answer",
                why=cause,
                fix="try again when the store is back: aenv store stats",
                code="store_unavailable",
            ) from error
        raise


async def _launch(ground: Ground, info: SandboxInfo, seat: Seat, boot_deadline: float) -> Running:
    phases, place = info.phases, seat.place
    manifest = await _manifest(ground, info)
    if manifest and manifest.memory is not None:
        return await _restore(ground, info, seat, manifest)
    with phase(phases, "open"):
        parts, _ = await together(_parts(ground, info, manifest), _disk(ground, info, place))
    spec = machine_spec(ground, info, place, parts)
    with phase(phases, "process"):
        machine = await ground.engine(info.engine).boot(spec)
        control = await machine.control()
    with phase(phases, "boot"):
        await agent.first_hello(machine, control, boot_deadline)
    with phase(phases, "init"):
        await agent.introduce(control, info, place.attachment)
    ground.snapshots.has_open(info.machine)
    if parts.root:
        ground.has_booted(info, parts.root)
    return Running(machine, control)


async def _manifest(ground: Ground, info: SandboxInfo) -> Manifest | None:
    """The snapshot it comes from; without its memory where it is booted from its disk.

    Raises Conflict if this node's engine cannot take it.
    """
    if info.snapshot_id is None:
        return None
    found = await ground.snapshots.find(info.snapshot_id)
    if info.from_disk and found.disk:
        return replace(found, memory=None)
    if found.memory is not None:
        here = asdict(await ground.engine(info.engine).features())
        if why := misfit(found.features, here):
            raise Conflict(
                f"snapshot {found.id} cannot be restored on this node",
                why=why,
                fix="resume it where it was saved, or from its disk alone (memory: false)",
                code="cannot_restore",
                state=str(info.state.shown),
            )
    return found


async def _parts(ground: Ground, info: SandboxInfo, manifest: Manifest | None) -> Parts:
    traits = ground.engine(info.engine).traits
    opening_root = ground.root(info.image_id, info.machine, whole=traits.one_root)
    if manifest is None and not traits.layered:
        return Parts(await opening_root, None)
    if manifest is None:
        opening_disk = ground.disk_base(info.resources.disk_mib, info.machine)
        return Parts(*await together(opening_root, opening_disk))
    root, opened = await together(opening_root, ground.snapshots.open(manifest, info.machine))
    return _parts_of(root, opened)


def _parts_of(root: FlatSource | None, opened: Opened) -> Parts:
    return Parts(root, opened.disk_base, opened.disk_below, opened.memory_map, opened.memory)


async def _disk(ground: Ground, info: SandboxInfo, place: Place) -> None:
    engine, path = ground.engine(info.engine), disk_of(ground, info)
    await engine.make_disk(path, info.resources.disk_mib, place.uid)


async def _waiting(
    ground: Ground, info: SandboxInfo, seat: Seat, manifest: Manifest
) -> tuple[Machine, Parts]:
    """The machine that waits in the seat, or one that is started now; and what it goes on from."""
    # Each waits for another: the block server for the store, the engine for its start.
    ready = _ready(ground, info, seat)
    if not ground.engine(info.engine).traits.waits:
        machine, opened = await together(ready, ground.snapshots.open(manifest, info.machine))
        return machine, _parts_of(None, opened)
    parts, disk = _parts(ground, info, manifest), _disk(ground, info, seat.place)
    machine, opened, _ = await together(ready, parts, disk)
    return machine, opened


async def _ready(ground: Ground, info: SandboxInfo, seat: Seat) -> Machine:
    if seat.waiting is not None and not seat.waiting.ended:
        return seat.waiting
    return await start_waiting(ground, info.machine, seat.place, shape_of(ground, info))


async def start_waiting(ground: Ground, machine: str, place: Place, shape: Shape) -> Machine:
    """A machine of this shape that waits to be restored, with what its engine needs for that.

    Raises ImageError, InfraError; then its folders and what is open for it are the caller's.
    """
    engine = ground.engine(shape.engine)
    spec = _waiting_spec(ground, machine, place, shape)
    if shape.image_id is not None:
        root, _ = await together(
            ground.root(shape.image_id, machine, whole=engine.traits.one_root),
            engine.make_disk(spec.disk, shape.disk_mib, place.uid),
        )
        spec = replace(spec, root=root)
    return await engine.ready(spec)


async def _restore(ground: Ground, info: SandboxInfo, seat: Seat, manifest: Manifest) -> Running:
    phases, place = info.phases, seat.place
    with phase(phases, "open"):
        machine, parts = await _waiting(ground, info, seat, manifest)
    with phase(phases, "process"):
        saved = Suspended(unpack(manifest.state), parts.memory_map, parts.memory)
        spec = machine_spec(ground, info, place, parts)
        await ground.engine(info.engine).restore(machine, spec, saved)
        control = await machine.control()
    with phase(phases, "init"):
        fresh = info.from_disk or manifest.fresh
        verdict = await agent.restored(control, info, place.attachment, fresh=fresh)
    ground.snapshots.has_open(info.machine)
    return Running(machine, control, verdict)


async def make_folders(ground: Ground, machine: str, place: Place) -> None:
    """The folders of a machine, its slot's user's own."""

    def make(folder: Path) -> None:
        with faults("the sandbox's folder could not be made"):
            folder.mkdir(mode=AGENT_USER_FOLDER_MODE, parents=True, exist_ok=True)
            os.chown(folder, place.uid, place.gid)

    for folder in (ground.files(machine), ground.run_dir(machine)):
        await asyncio.to_thread(make, folder)


async def dismantle(ground: Ground, info: SandboxInfo, machine: Machine | None) -> None:
    """Remove every object of the sandbox's machine, and take traffic away.

    A step that fails does not stop those after it; the first failure is raised at the end,
    so that the record stays and the node tries again.
    """
    try:
        await ground.withdraw(info)
    finally:
        await remove_machine(ground, info, machine)


async def remove_machine(ground: Ground, info: SandboxInfo, machine: Machine | None) -> None:
    """As ``dismantle``, but traffic stays as it is."""
    failures: list[Exception] = []

    async def end_machine() -> None:
        nonlocal machine
        if machine is None and info.slot is not None:
            spec = machine_spec(ground, info, ground.place(info.slot))
            machine = await ground.engine(info.engine).adopt(spec)
        if machine is not None:
            await machine.kill()

    async def remove_files() -> None:
        for folder in (ground.run_dir(info.machine), ground.files(info.machine)):
            await asyncio.to_thread(_remove_tree, folder)

    async def free_slot() -> None:
        if info.slot is not None and not failures:
            await ground.give_slot(info.slot)

    async def release() -> None:
        await ground.release(info.machine)

    for step in (end_machine, release, remove_files, free_slot):
        try:
            await step()
        except Exception as error:
            log.exception("dismantling %s: a step failed", info.machine)
            failures.append(error)
    if failures:
        raise failures[0]


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
