"""What a sandbox stands on: the node's resources as a contract."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentenv.engine.contract import Attachment, Engine, FlatSource, Machine
from agentenv.layer.layers import Part
from agentenv.sandbox.network import Policy
from agentenv.sandbox.record import SandboxInfo
from agentenv.snapshot.repository import Snapshots


@dataclass(frozen=True, slots=True)
class Place:
    """A network slot taken by a sandbox: where it plugs in and whom it runs as."""

    index: int
    attachment: Attachment
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What a machine must have been made with to be restored as a sandbox: engine, size, and image
    and disk of engines that do not wait without them."""

    engine: str
    vcpus: int
    memory_mib: int
    image_id: str | None = None
    disk_mib: int = 0


@dataclass(frozen=True, slots=True)
class Seat:
    """A place for a machine of this name, perhaps with one that waits there to be restored."""

    place: Place
    machine: str
    waiting: Machine | None = None


class Ground(Protocol):
    """Every method may be repeated: "already so" is success. A ``machine`` is named by
    ``SandboxInfo.machine``."""

    def engine(self, name: str) -> Engine:
        """Raises Conflict (``engine_unavailable``)."""
        ...

    @property
    def snapshots(self) -> Snapshots: ...

    async def save(self, info: SandboxInfo) -> None:
        """Make the record durable."""
        ...

    async def take_seat(self, info: SandboxInfo) -> Seat:
        """A slot with the sandbox's policy and its machine's folders: until ``give_slot``."""
        ...

    async def give_slot(self, index: int) -> None: ...

    def place(self, index: int) -> Place:
        """The place of a slot that is taken."""
        ...

    async def fence(self, index: int, policy: Policy) -> None:
        """Replace the rules of a slot that is taken, at once."""
        ...

    async def root(self, image_id: str, machine: str, *, whole: bool) -> FlatSource:
        """The image, open for the machine until ``release``; ``whole`` as one file."""
        ...

    async def blank(self, size_mib: int) -> Part:
        """The layer that is the blank disk of this size."""
        ...

    async def disk_base(self, size_mib: int, machine: str) -> Path:
        """The blank disk, open for the machine until ``release``."""
        ...

    def storage_fault(self, machine: str) -> str | None:
        """What holds up the machine's reads."""
        ...

    async def release(self, machine: str) -> None:
        """Nothing is open for the machine any more."""
        ...

    def has_booted(self, info: SandboxInfo, root: FlatSource) -> None:
        """What its boot read may be remembered for other nodes."""
        ...

    def files(self, machine: str) -> Path:
        """The machine's folder in the home: its disk."""
        ...

    def run_dir(self, machine: str) -> Path:
        """The machine's runtime folder: sockets, console."""
        ...

    async def publish(self, info: SandboxInfo, place: Place) -> None:
        """Let traffic reach the sandbox and answer its name look-ups."""
        ...

    def will_publish(self, info: SandboxInfo, place: Place) -> None:
        """As ``publish``, for one that runs already: told with all others after a restart."""
        ...

    async def sleep(self, info: SandboxInfo, wakes: bool) -> None:
        """Cut traffic, open streams too, as long as it is paused; with ``wakes`` traffic that
        comes then waits, and has it resumed."""
        ...

    def will_sleep(self, info: SandboxInfo, wakes: bool) -> None:
        """As ``sleep``, for one that is paused already: told with all others after a restart."""
        ...

    async def withdraw(self, info: SandboxInfo) -> None:
        """Cut traffic, open streams too."""
        ...
