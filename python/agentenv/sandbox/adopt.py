"""After a restart of the server: from a record to the machine that it tells of."""

from __future__ import annotations

from dataclasses import replace

from agentenv.engine.contract import ExitCause, ExitKind, Machine
from agentenv.errors import GuestError, InfraError
from agentenv.sandbox import launch, suspend
from agentenv.sandbox.ground import Ground
from agentenv.sandbox.launch import Running
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import State


async def find(ground: Ground, info: SandboxInfo) -> Running | ExitCause:
    """The machine of a sandbox that ran, which goes on; or why there is none any more."""
    if info.state is State.RUNNING and info.slot is not None:
        spec = launch.machine_spec(ground, info, ground.place(info.slot))
        if machine := await ground.engine(info.engine).adopt(spec):
            return await _take_over(ground, info, machine)
    half_made = info.state is State.CREATING
    reason = (
        "the server was restarted while it was being made"
        if half_made
        else "the machine ended while no server watched"
    )
    return ExitCause(ExitKind.UNKNOWN, reason)


async def _take_over(ground: Ground, info: SandboxInfo, machine: Machine) -> Running | ExitCause:
    try:
        control = await machine.control()
        await machine.go_on()  # an earlier server may have died while it was saving it
        await suspend.go_on(control)
    except (InfraError, GuestError, TimeoutError):
        return replace(await machine.kill(), console=machine.console_tail())
    for held in filter(None, (info.snapshot_id, info.disk_id)):
        ground.snapshots.adopt(held, info.machine)
    return Running(machine, control)
