"""A second machine for a sandbox that runs: restored beside the first, so that a failure costs
nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentenv.engine.contract import ControlChannel, Machine
from agentenv.sandbox import launch
from agentenv.sandbox.ground import Ground
from agentenv.sandbox.launch import Running
from agentenv.sandbox.record import SandboxInfo
from agentenv.snapshot.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Second:
    """What a sandbox is with its other machine."""

    info: SandboxInfo
    running: Running


def next_life(info: SandboxInfo, manifest: Manifest) -> SandboxInfo:
    """The record of a running sandbox as it goes on from a snapshot: its id, tokens, network and
    deadline stay."""
    return info.with_(
        generation=info.generation + 1,
        snapshot_id=manifest.id,
        disk_id=manifest.id,
        image_id=manifest.image_id,
        resources=manifest.resources,
        engine=manifest.engine,
        slot=None,
        machine="",
        network_pending=False,
        guest_silent=False,
        from_disk=False,
        restore=None,
        phases={},
    )


@asynccontextmanager
async def beside(
    ground: Ground,
    info: SandboxInfo,
    manifest: Manifest,
    turns: asyncio.Semaphore,
    boot_deadline: float,
) -> AsyncGenerator[Second]:
    """The sandbox on a machine of its next generation; that is gone again if the block fails.

    Raises Conflict (``cannot_restore``), ImageError, GuestError, InfraError.
    """
    info = next_life(info, manifest)
    with launch.phase(info.phases, "slot"):
        seat = await ground.take_seat(info)
    info = info.with_(slot=seat.place.index, machine=seat.machine)
    running: Running | None = None
    try:
        async with turns:
            running = await launch.launch(ground, info, seat, boot_deadline)
        yield Second(info.with_(restore=running.verdict), running)
    except BaseException:
        machine, control = (running.machine, running.control) if running else (None, None)
        await asyncio.shield(remove(ground, info, machine, control))
        raise


async def remove(
    ground: Ground, info: SandboxInfo, machine: Machine | None, control: ControlChannel | None
) -> None:
    """Take a machine away whose sandbox goes on without it; what stays, the next start removes."""
    try:
        if control is not None:
            await control.close()
        await launch.remove_machine(ground, info, machine)
    except Exception:
        log.exception("machine %s of %s is not wholly removed", info.machine, info.id)
