"""Control groups, v1 and v2: limits, kill, memory events. One parent per owner, one group per name.

v1 (also hybrid): one hierarchy per controller, the group is a folder in each. v2: one hierarchy,
controllers are switched on for the children of each folder on the way. Which is there is found
by looking; a controller that is missing is named by ``missing`` and its limit not enforced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import InfraError

CONTROLLERS = ("cpu", "memory", "pids")
QUOTA_PERIOD = 100_000  # microseconds, the kernel's default
EMPTY_DEADLINE = 30.0  # seconds for killed processes to leave
V1_SHARES_PER_WEIGHT = 1024 / 100  # v1's default share is 1024, v2's default weight 100


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """``cpu_weight`` 1..10000 (100 is the default), ``cpu_quota`` in CPUs, memory in bytes."""

    memory_bytes: int
    pids: int
    cpu_weight: int = 100
    cpu_quota: float | None = None


def v1_values(limits: GroupLimits) -> dict[str, dict[str, str]]:
    """Controller to file to value."""
    quota = -1 if limits.cpu_quota is None else int(limits.cpu_quota * QUOTA_PERIOD)
    shares = max(2, int(limits.cpu_weight * V1_SHARES_PER_WEIGHT))
    return {
        "cpu": {"cpu.shares": str(shares), "cpu.cfs_quota_us": str(quota)},
        "memory": {"memory.limit_in_bytes": str(limits.memory_bytes)},
        "pids": {"pids.max": str(limits.pids)},
    }


def v2_values(limits: GroupLimits) -> dict[str, dict[str, str]]:
    """Controller to file to value."""
    quota = "max" if limits.cpu_quota is None else str(int(limits.cpu_quota * QUOTA_PERIOD))
    return {
        "cpu": {"cpu.weight": str(limits.cpu_weight), "cpu.max": f"{quota} {QUOTA_PERIOD}"},
        "memory": {"memory.max": str(limits.memory_bytes), "memory.oom.group": "1"},
        "pids": {"pids.max": str(limits.pids)},
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each controller's hierarchy is mounted; ``unified`` if all are one v2 tree."""

    unified: bool
    roots: dict[str, Path]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in CONTROLLERS if name not in self.roots)


def detect(mounts: str | None = None) -> Layout:
    """Look at /proc/self/mounts. A v1 controller wins over v2, as it does in the kernel."""
    roots: dict[str, Path] = {}
    unified: Path | None = None
    for line in (mounts or Path("/proc/self/mounts").read_text()).splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup":
            for name in set(options.split(",")) & set(CONTROLLERS):
                roots.setdefault(name, Path(where))
        elif kind == "cgroup2":
            unified = Path(where)
    if roots or unified is None:
        return Layout(False, roots)
    offered = (unified / "cgroup.controllers").read_text().split()
    return Layout(True, {name: unified for name in CONTROLLERS if name in offered})


class Cgroups:
    """The groups below ``parent`` (a relative path such as ``agentenv/1a2b3c4d``)."""

    def __init__(self, parent: str, layout: Layout | None = None) -> None:
        self.layout = layout or detect()
        self._parent = parent

    def create(self, name: str, limits: GroupLimits) -> tuple[Path, ...]:
        """Make the group and set its limits; the ``cgroup.procs`` files a process must enter.

        Raises InfraError if there is no controller at all, or one refuses its limit.
        """
        if not self.layout.roots:
            raise InfraError(
                "this machine offers no cgroup controller",
                fix="mount cgroup2 at /sys/fs/cgroup",
                code="no_cgroups",
            )
        values = v2_values(limits) if self.layout.unified else v1_values(limits)
        try:
            for folder in self._folders(name):
                self._make(folder)
            for controller, root in self.layout.roots.items():
                for file, value in values[controller].items():
                    (root / self._parent / name / file).write_text(value)
        except OSError as error:
            self._remove_folders(name)
            raise InfraError(
                f"cgroup {name} could not be set up", why=str(error), code="cgroup_failed"
            ) from error
        return tuple(folder / "cgroup.procs" for folder in self._folders(name))

    def oom_kills(self, name: str) -> int:
        """How many processes of the group the kernel killed for memory."""
        root = self.layout.roots.get("memory")
        if root is None:
            return 0
        file = "memory.events" if self.layout.unified else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (root / self._parent / name / file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def memory_bytes(self, name: str) -> int | None:
        """Memory charged to the group now."""
        root = self.layout.roots.get("memory")
        file = "memory.current" if self.layout.unified else "memory.usage_in_bytes"
        with contextlib.suppress(OSError):
            return int((root / self._parent / name / file).read_text()) if root else None
        return None

    async def remove(self, name: str) -> None:
        """Kill what is in the group and remove it; a group that is not there is success.

        Raises InfraError if its processes do not go away.
        """
        try:
            async with asyncio.timeout(EMPTY_DEADLINE):
                while not self._remove_folders(name):
                    self._kill(name)
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise InfraError(
                f"processes of cgroup {name} do not end", why=str(self.pids(name))
            ) from None

    def names(self) -> set[str]:
        """Every group below the parent."""
        found: set[str] = set()
        for root in set(self.layout.roots.values()):
            with contextlib.suppress(FileNotFoundError):
                found |= {p.name for p in (root / self._parent).iterdir() if p.is_dir()}
        return found

    def pids(self, name: str) -> set[int]:
        found: set[int] = set()
        for folder in self._folders(name):
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        return found

    def remove_parent(self) -> None:
        """Remove the empty parent; one that still has groups stays."""
        for root in set(self.layout.roots.values()):
            for folder in (root / self._parent, (root / self._parent).parent):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _folders(self, name: str) -> list[Path]:
        return [root / self._parent / name for root in dict.fromkeys(self.layout.roots.values())]

    def _make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.layout.unified:
            root = next(iter(self.layout.roots.values()))
            for above in reversed(folder.relative_to(root).parents):
                _delegate(root / above, self.layout.roots)

    def _kill(self, name: str) -> None:
        if self.layout.unified:
            for folder in self._folders(name):
                with contextlib.suppress(OSError):
                    (folder / "cgroup.kill").write_text("1")
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _remove_folders(self, name: str) -> bool:
        gone = True
        for folder in self._folders(name):
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                gone = False
        return gone


def _delegate(folder: Path, controllers: Iterable[str]) -> None:
    """Switch controllers on for the children of ``folder``.

    A v2 group with processes of its own (a container's root) cannot have controlled children, so
    its processes move to a leaf beside ours.
    """
    wanted = " ".join(f"+{name}" for name in controllers)
    control = folder / "cgroup.subtree_control"
    if all(name in control.read_text().split() for name in controllers):
        return
    try:
        control.write_text(wanted)
    except OSError:
        leaf = folder / "agentenv-host"
        leaf.mkdir(exist_ok=True)
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (leaf / "cgroup.procs").write_text(pid)
        control.write_text(wanted)
