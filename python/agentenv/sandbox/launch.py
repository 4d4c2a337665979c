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
from pathlib import Path

from agentenv.engine.contract import (
    ControlChannel,
    ExitCause,
    FlatSource,
    Limits,
    Machine,
    MachineSpec,
)
from agentenv.errors import faults
from agentenv.sandbox import agent
from agentenv.sandbox.ground import Ground, Place
from agentenv.sandbox.record import SandboxInfo

log = logging.getLogger(__name__)

# QEMU itself: 35 MB measured idle, its translation cache, and room for I/O buffers.
ENGINE_OVERHEAD = 320 << 20
AGENT_USER_FOLDER_MODE = 0o700


@contextmanager
def phase(phases: dict[str, float], name: str) -> Generator[None]:
    """Record how long a step of creation took, in seconds."""
    begun = time.monotonic()
    yield
    phases[name] = round(time.monotonic() - begun, 6)


def machine_spec(
    ground: Ground,
    info: SandboxInfo,
    place: Place,
    root: FlatSource | None = None,
    disk_base: Path | None = None,
) -> MachineSpec:
    """What the engine boots for this sandbox; without files, what it finds it again by."""
    size = info.resources
    return MachineSpec(
        sandbox_id=info.id,
        run_dir=ground.run_dir(info.id),
        root=root,
        disk=ground.files(info.id) / "disk.qcow2",
        disk_base=disk_base,
        vcpus=size.vcpus,
        memory_mib=size.memory_mib,
        network=place.attachment,
        uid=place.uid,
        gid=place.gid,
        cgroup=info.id,
        limits=Limits(memory_bytes=(size.memory_mib << 20) + ENGINE_OVERHEAD),
    )


async def launch(
    ground: Ground, info: SandboxInfo, place: Place, boot_deadline: float
) -> tuple[Machine, ControlChannel]:
    """Boot and introduce the guest; times go to ``info.phases``. On failure: ``dismantle``."""
    phases = info.phases
    with phase(phases, "root"):
        root = await ground.root(info.image_id, info.id)
        base = await ground.disk_base(info.resources.disk_mib, info.id)
    with phase(phases, "disk"):
        await _folders(ground, info, place)
        disk = ground.files(info.id) / "disk.qcow2"
        await ground.make_disk(disk, info.resources.disk_mib, place.uid)
    spec = machine_spec(ground, info, place, root, base)
    with phase(phases, "process"):
        machine = await ground.engine.boot(spec)
        control = await machine.control()
    with phase(phases, "boot"):
        await agent.first_hello(machine, control, boot_deadline)
    with phase(phases, "init"):
        await agent.introduce(control, info, place.attachment)
    ground.has_booted(info, root)
    return machine, control


async def _folders(ground: Ground, info: SandboxInfo, place: Place) -> None:
    def make(folder: Path) -> None:
        with faults("the sandbox's folder could not be made"):
            folder.mkdir(mode=AGENT_USER_FOLDER_MODE, parents=True, exist_ok=True)
            os.chown(folder, place.uid, place.gid)

    for folder in (ground.files(info.id), ground.run_dir(info.id)):
        await asyncio.to_thread(make, folder)


async def dismantle(ground: Ground, info: SandboxInfo, machine: Machine | None) -> ExitCause | None:
    """Remove every object of the sandbox; return why its machine ended, if there was one.

    A step that fails does not stop those after it; the first failure is raised at the end,
    so that the record stays and the node tries again.
    """
    cause: ExitCause | None = None
    failures: list[Exception] = []

    async def end_machine() -> None:
        nonlocal machine, cause
        if machine is None and info.slot is not None:
            spec = machine_spec(ground, info, ground.place(info.slot))
            machine = await ground.engine.adopt(spec)
        if machine is not None:
            cause = await machine.kill()

    async def remove_files() -> None:
        for folder in (ground.run_dir(info.id), ground.files(info.id)):
            await asyncio.to_thread(_remove_tree, folder)

    async def free_slot() -> None:
        if info.slot is not None and not failures:
            await ground.give_slot(info.slot)

    async def release() -> None:
        await ground.release(info.id)

    for step in (lambda: ground.withdraw(info), end_machine, release, remove_files, free_slot):
        try:
            await step()
        except Exception as error:
            log.exception("dismantling %s: a step failed", info.id)
            failures.append(error)
    if failures:
        raise failures[0]
    return cause


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
