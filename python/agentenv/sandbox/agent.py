"""The host's side of the handshake with the guest agent, over the engine's control channel."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from agentenv.concurrency import Tasks
from agentenv.engine.contract import Attachment, ControlChannel, Machine
from agentenv.errors import GuestError
from agentenv.sandbox.record import SandboxInfo, Verdict

ENTROPY_BYTES = 64  # a kernel generator is seeded by 32; twice that costs nothing
END_AFTER_CUT = 5.0  # seconds
FREEZE_DEADLINE = 0.5  # seconds; a process in an uninterruptible wait is not waited for
ANSWER_DEADLINE = 2.0  # seconds; a guest that does not answer is saved as it is
CLOCK_TOLERANCE_MS = 100.0  # DESIGN.md, the restore contract
INIT_DEADLINE = 30.0  # seconds; it takes 20-200 ms even emulated


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the agent reported of itself and of its start."""

    version: str
    clock_error_ns: int
    entropy_reseeded: bool
    default_user: str
    home: str


def init_arguments(
    info: SandboxInfo, network: Attachment | None, now_ns: int, *, fresh: bool = False
) -> dict[str, Any]:
    """The arguments of the agent's ``init``; fresh entropy at every call."""
    return {
        "generation": info.generation,
        "sandbox_id": info.id,
        "hostname": info.id,
        "time_ns": now_ns,
        "entropy": base64.b64encode(os.urandom(ENTROPY_BYTES)).decode(),
        "machine_id": machine_id(info.id),
        "access_token": info.access_token,
        "env": {**info.guest.env, "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": info.id},
        "default_user": info.guest.user,
        "default_workdir": info.guest.workdir,
        "network": network and _network(network),
        "volumes": list(info.guest.volumes),
        "disk_bytes": info.resources.disk_mib << 20,
        "memory_bytes": info.resources.memory_mib << 20,
        "fresh": fresh,
    }


def machine_id(sandbox_id: str) -> str:
    """A sandbox's own in all its generations, as its hostname is."""
    return hashlib.blake2b(sandbox_id.encode(), digest_size=16).hexdigest()


def _network(network: Attachment) -> dict[str, Any]:
    values = asdict(network)
    return {key: values[key] for key in ("address", "gateway", "dns", "mtu")}


async def first_hello(machine: Machine, control: ControlChannel, deadline: float) -> dict[str, Any]:
    """Wait until the agent answers.

    Raises GuestError (``guest_boot_failed``) with the machine's cause if it ends
    before, (``guest_boot_timeout``) with the last console lines after ``deadline`` seconds.
    """
    tasks = Tasks()
    hello = tasks.start(control.call("hello", timeout=deadline), "hello")
    ended = tasks.start(machine.wait(), "machine end before hello")
    try:
        await asyncio.wait((hello, ended), return_when=asyncio.FIRST_COMPLETED)
        if hello.done() and hello.exception() is None:
            return hello.result()
        # A machine that ends cuts the channel first; its cause is known a moment later.
        await asyncio.wait((ended,), timeout=END_AFTER_CUT)
        if ended.done():
            cause = ended.result()
            raise GuestError(
                "the guest ended before its agent answered",
                why=cause.reason,
                code="guest_boot_failed",
                console=list(cause.console),
            )
        raise GuestError(
            f"the guest's agent did not answer within {deadline:g} s of its start",
            why="last console line: " + (machine.console_tail(1) or ("none",))[-1],
            fix="see `aenv logs`; a crowded machine may need a larger boot_deadline",
            code="guest_boot_timeout",
            console=list(machine.console_tail()),
        )
    finally:
        await tasks.close()


async def introduce(
    control: ControlChannel, info: SandboxInfo, network: Attachment | None
) -> Greeting:
    """Give a booted agent its identity, clock, entropy and network."""
    hello = await control.call("hello", timeout=INIT_DEADLINE)
    arguments = init_arguments(info, network, time.time_ns())
    done = await control.call("init", arguments, timeout=INIT_DEADLINE)
    return Greeting(
        hello["version"],
        done["clock_error_ns"],
        done["entropy_reseeded"],
        done["default_user"],
        done["home"],
    )


async def restored(
    control: ControlChannel, info: SandboxInfo, network: Attachment | None, *, fresh: bool = False
) -> Verdict:
    """The restore contract's handshake: what ran before is told who and when it is now; only then
    its processes go on, or end if it is to be ``fresh``, as after a boot.

    Raises GuestError (``restore_contract``) if a promise is not kept.
    """
    sent = time.time_ns()
    arguments = init_arguments(info, network, sent, fresh=fresh)
    done = await control.call("init", arguments, timeout=INIT_DEADLINE)
    verdict = Verdict(
        clock_error_ms=clock_error(done, time.time_ns() - sent) / 1e6,
        entropy_reseeded=done["entropy_reseeded"],
        identity_fresh=info.origin is not None and info.generation == 1,
        connections_dropped=done.get("connections_dropped", 0),
        frozen=done.get("frozen", False),
    )
    if not verdict.entropy_reseeded or verdict.clock_error_ms > CLOCK_TOLERANCE_MS:
        raise GuestError(
            "the restored guest does not keep the restore contract",
            why=f"clock {verdict.clock_error_ms:.1f} ms off, reseeded {verdict.entropy_reseeded}",
            code="restore_contract",
        )
    return verdict


def clock_error(done: dict[str, Any], took: int) -> int:
    """Nanoseconds that a guest's clock is off, from its answer ``took`` after the question. A clock
    that is the host's was not set: it has gone on while the question was on its way."""
    error = int(done["clock_error_ns"])
    if done.get("clock_is_hosts"):
        return max(0, -error, error - took)
    return abs(error)


async def suspend(control: ControlChannel) -> bool:
    """Stop the guest's processes before it is saved; whether all of them did in time.

    Raises GuestError (``guest_unresponsive``).
    """
    arguments = {"deadline_ms": int(FREEZE_DEADLINE * 1000)}
    answer = await control.call("suspend", arguments, timeout=FREEZE_DEADLINE + ANSWER_DEADLINE)
    return bool(answer["frozen"])


async def release(control: ControlChannel) -> None:
    """Let the guest's processes go on after ``suspend``. Raises GuestError."""
    await control.call("release", timeout=INIT_DEADLINE)
