"""What every engine promises: boot a machine from files, reach it, stop it, say why it ended.

An engine knows no image, layer or snapshot: it gets paths, descriptors and
sizes. A ``Machine`` is one run of a guest; it outlives the server process and
is found again by ``Engine.adopt``.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class FlatSource:
    """A read-only block file given as consecutive segments, each a multiple of 4096 bytes."""

    segments: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where the guest's network device plugs in, and the addresses the guest configures.

    ``netns`` is the path of the network namespace holding ``tap``; ``address``
    is in CIDR form; ``mac`` is the guest's, ``host_mac`` that of ``tap``.
    """

    netns: Path
    tap: str
    mac: str
    address: str
    gateway: str
    dns: tuple[str, ...]
    mtu: int = 1500
    host_mac: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine as a whole may use on the host.

    ``cpu_weight`` is 1..10000 with 100 as default (cgroup v2's scale),
    ``cpu_quota`` in CPUs (None: no bound), ``memory_bytes`` bounds guest memory
    plus the engine's own, ``pids`` bounds engine threads.
    """

    memory_bytes: int
    pids: int = 512
    cpu_weight: int = 100
    cpu_quota: float | None = None


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """All an engine needs to boot one machine.

    ``run_dir`` (0700, owned by ``uid``) is for the engine's sockets, console
    log and process record; it exists when ``boot`` is called and is removed by
    the caller after the machine has ended. ``disk`` is a qcow2 file the engine
    may write, over those of ``disk_below`` (lowest first, not written any more), over the blocks of
    ``disk_base``. ``cgroup`` is a name relative to the node's delegated parent. ``root`` and
    ``disk_base`` may be None where the machine runs already.
    """

    sandbox_id: str
    run_dir: Path
    root: FlatSource | None
    disk: Path
    disk_base: Path | None
    vcpus: int
    memory_mib: int
    network: Attachment | None
    uid: int
    gid: int
    cgroup: str
    limits: Limits
    kernel_args: tuple[str, ...] = ()
    disk_below: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspended:
    """What a machine was when it was saved, apart from its disk.

    ``state`` is the engine's own. ``memory_map`` says which bytes of which files its memory
    consists of (`rust/map`), ``memory`` are those files, lowest first.
    """

    state: bytes
    memory_map: bytes
    memory: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Where a machine is to be saved.

    ``memory``: an empty file that gets the pages which are the machine's own, each at its own
    place; None to save the disk only. ``disk``: a fresh empty disk on which the machine goes on,
    while the one it had is written no more; None for a machine that will not.
    """

    memory: Path | None
    disk: Path | None = None


@dataclass(frozen=True, slots=True)
class SavedPages:
    """Pages in a plan's ``memory`` file: ``runs`` as `agentenv._core` packs them; ``size`` bytes
    are no zeroes."""

    runs: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved. ``write`` puts the pages into the plan's file, once; where the machine goes
    on, it does so meanwhile. ``phases`` are seconds of each step, that of ``write`` added by it.
    """

    state: bytes
    write: Callable[[], Awaitable[SavedPages]]
    phases: dict[str, float]


@dataclass(frozen=True, slots=True)
class Features:
    """What a saved machine needs of the engine that restores it; equal, or it does not run."""

    engine: str
    version: str
    accelerator: str
    cpu: str
    kernel: str
    tsc_khz: int


class ExitKind(enum.StrEnum):
    """Why a machine ended."""

    STOPPED = "stopped"  # asked to, by us or by the guest powering itself off
    KILLED = "killed"  # the engine process was killed by a signal that we did not send
    PANIC = "panic"  # the guest's kernel panicked
    OUT_OF_MEMORY = "out_of_memory"  # the host's memory limit of the machine was hit
    FAILED = "failed"  # the engine itself failed: bad arguments, missing file, internal error
    UNKNOWN = "unknown"  # it ended while nobody watched


@dataclass(frozen=True, slots=True)
class ExitCause:
    """The post-mortem: kind, a sentence for people, engine exit status, last console lines."""

    kind: ExitKind
    reason: str
    status: int | None = None
    console: tuple[str, ...] = ()


class ControlChannel(Protocol):
    """Request and reply with the guest agent's control face; calls are serialised by the channel.

    ``call`` raises GuestError (``guest_unresponsive``) when no reply came in
    ``timeout`` seconds and GuestError with the agent's code and message when it refused.
    """

    async def call(self, op: str, args: dict[str, Any] | None = None, *, timeout: float) -> Any: ...
    async def close(self) -> None: ...


class Machine(Protocol):
    """A running guest."""

    @property
    def pid(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    async def control(self) -> ControlChannel:
        """The machine's one channel, shared by all who ask."""
        ...

    async def stop(self, grace: float) -> ExitCause:
        """Ask the guest to power off, force it after ``grace`` seconds."""
        ...

    async def kill(self) -> ExitCause: ...

    async def wait(self) -> ExitCause:
        """Return when the machine has ended, however it did. May be awaited by several."""
        ...

    async def proceed(self) -> bool:
        """Let a guest go on that was stopped because its storage failed; whether it was."""
        ...

    async def save(self, plan: SavePlan) -> Saved:
        """Save the machine as it is now. With a disk to go on with it runs again when this
        returns; without it stays stopped, for ``kill`` or ``go_on``.

        Raises InfraError; then the machine runs as before.
        """
        ...

    async def writes(self, disk: Path) -> bool:
        """Whether it has gone on with ``disk``, the fresh one of a plan. Raises InfraError."""
        ...

    async def go_on(self) -> None:
        """Let a machine run that ``save`` left stopped. Raises InfraError."""
        ...

    def console_tail(self, lines: int = 40) -> tuple[str, ...]: ...

    def objects(self) -> dict[str, Any]:
        """Host objects for `aenv inspect`: pid, sockets, files, cgroup."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do on this machine; part of ``GET /nodes/{id}`` and ``aenv doctor``."""

    engine: str
    version: str
    accelerator: str
    default_vcpus: int
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Traits:
    """What others must know of an engine before they make a machine.

    ``one_root``: the root is wanted as one file, not as segments. ``layered``: the writable disk
    is a thing of its own, and memory is saved as what changed since the machine was restored; an
    engine that is not saves all it has as one file. ``waits``: ``ready`` needs neither root nor
    disk. ``disk_name`` is that of a machine's writable disk. ``overhead`` is what the engine itself
    may take, in bytes; ``pids`` its threads. ``bounds_cpus``: it sees to it itself that a guest has
    no more CPUs than it was given.
    """

    name: str
    one_root: bool
    layered: bool
    waits: bool
    bounds_cpus: bool
    disk_name: str
    overhead: int
    pids: int = 512


class Engine(Protocol):
    """Boots machines. Implementations: ``engine.qemu``, ``engine.gvisor``."""

    @property
    def traits(self) -> Traits: ...

    async def capabilities(self) -> Capabilities: ...

    async def boot(self, spec: MachineSpec) -> Machine:
        """Start a machine and return as soon as its process runs; readiness is the agent's to say.

        Raises MissingTool, InfraError; on failure or cancellation nothing of the machine is left
        but what ``forget`` lets go of.
        """
        ...

    async def features(self) -> Features: ...

    async def make_disk(self, path: Path, size_mib: int, uid: int) -> None:
        """An empty disk to write to, sparse. Raises InfraError."""
        ...

    async def ready(self, spec: MachineSpec) -> Machine:
        """A machine of this size in this place that waits to be restored; root and disks are not
        looked at yet if the engine ``waits``. Raises as ``boot``."""
        ...

    async def restore(self, waiting: Machine, spec: MachineSpec, saved: Suspended) -> None:
        """Have a waiting machine go on where ``save`` left one; it runs when this returns.

        Raises InfraError (``restore_failed``, …); then it is the caller's to kill.
        """
        ...

    async def adopt(self, spec: MachineSpec) -> Machine | None:
        """Find the machine that ``boot`` started for this spec earlier; None if it is gone."""
        ...

    async def sweep(self, keep: set[str]) -> None:
        """End machines of this node whose sandbox is not in ``keep``."""
        ...

    async def forget(self, machine: str) -> None:
        """Let go of the root that a machine which has ended was made from, after whoever shows it
        has: reads of it that wait end no sooner. Raises InfraError."""
        ...

    async def forget_all_but(self, keep: set[str]) -> None: ...

    async def leave(self) -> None:
        """No machine runs any more: take away what serves them outside the home."""
        ...
