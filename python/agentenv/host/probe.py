"""Facts about this Linux host, as found: no verdicts here.

Everything is read below ``root`` (``/`` but for tests) and parsed by pure functions, except what
only a tool tells: addresses, routes, firewall policies, versions.
"""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, cast

from agentenv.errors import InfraError
from agentenv.host.process import Completed, run

TOOL_DEADLINE = 10.0  # seconds, for a tool to say its version on a busy machine
Run = Callable[[Sequence[str]], Awaitable[Completed]]


class Access(enum.StrEnum):
    """What became of opening a device for reading and writing."""

    OPENS = "opens"
    ABSENT = "absent"
    DENIED = "denied"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: all of it, what new work could have without swapping, swap."""

    total: int
    available: int
    swap: int


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where each controller is mounted; ``unified`` is the cgroup v2 mount, if there is one.

    A hybrid host has both: v1 controllers in ``v1``, the rest under ``unified``.
    """

    unified: Path | None
    unified_controllers: frozenset[str]
    v1: Mapping[str, Path]

    def version_of(self, controller: str) -> int | None:
        """2 or 1 by where the controller can be used; None if nowhere."""
        if controller in self.unified_controllers:
            return 2
        return 1 if controller in self.v1 else None


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that holds, or would hold, a path; sizes in bytes."""

    path: Path
    total: int
    free: int
    kind: str


@dataclass(frozen=True, slots=True)
class Route:
    """A network that this host reaches or is part of, and the interface."""

    network: IPv4Network
    device: str


@dataclass(frozen=True, slots=True)
class ToolVersion:
    """A tool that was found; ``version`` is empty if it did not say one."""

    path: Path
    version: str

    @property
    def numbers(self) -> tuple[int, ...]:
        return version_numbers(self.version)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the kernel says of itself. ``capabilities`` is this process's effective set."""

    release: str
    cpus: int
    filesystems: frozenset[str]
    capabilities: int
    ip_forward: bool
    overcommit: int
    clocksource: str

    @property
    def version(self) -> tuple[int, ...]:
        return version_numbers(self.release)


_DOTTED = r"\d+(?:\.\d+)+"


def version_numbers(text: str) -> tuple[int, ...]:
    """The first dotted number in ``text``: ``6.12.95+deb12`` is (6, 12, 95)."""
    match = re.search(_DOTTED, text)
    return tuple(map(int, match.group().split("."))) if match else ()


def parse_memory(meminfo: str) -> Memory:
    """``/proc/meminfo``; kernels older than MemAvailable are not supported."""
    kib = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in meminfo.splitlines())
        if value.split()
    }
    return Memory(kib["MemTotal"] << 10, kib["MemAvailable"] << 10, kib.get("SwapTotal", 0) << 10)


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo: where, what kind, the super block's options."""

    point: Path
    kind: str
    options: tuple[str, ...]


def parse_mounts(mountinfo: str) -> list[Mount]:
    """``/proc/self/mountinfo``, in its order: a later mount covers an earlier one."""
    mounts: list[Mount] = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        if separator:
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), left.split()[4])
            kind, _, options = right.split(" ", 2)
            mounts.append(Mount(Path(point), kind, tuple(options.split(","))))
    return mounts


def find_cgroups(mounts: Sequence[Mount], controllers_of: Callable[[Path], str]) -> Cgroups:
    """``controllers_of`` reads ``cgroup.controllers`` of the unified mount."""
    unified = next((mount.point for mount in mounts if mount.kind == "cgroup2"), None)
    v1: dict[str, Path] = {}
    for mount in mounts:
        if mount.kind == "cgroup":
            plain = {o for o in mount.options if o not in {"ro", "rw", "xattr"} and "=" not in o}
            v1.update(dict.fromkeys(plain, mount.point))
    words = controllers_of(unified).split() if unified is not None else []
    return Cgroups(unified, frozenset(words), v1)


def parse_routes(addresses: str, routes: str) -> list[Route]:
    """``ip -j -4 addr`` and ``ip -j -4 route show table all``; loopback and defaults left out."""
    found: dict[Route, None] = {}
    for link in cast("list[dict[str, Any]]", json.loads(addresses or "[]")):
        for info in link.get("addr_info", ()):
            network = IPv4Network(f"{info['local']}/{info['prefixlen']}", strict=False)
            found[Route(network, link["ifname"])] = None
    for route in cast("list[dict[str, Any]]", json.loads(routes or "[]")):
        if route["dst"] != "default" and route.get("type", "unicast") == "unicast":
            found[Route(IPv4Network(route["dst"], strict=False), route.get("dev", ""))] = None
    return [route for route in found if not route.network.is_loopback and route.network.prefixlen]


def forward_policy(chains: str, legacy: str = "") -> str:
    """``drop`` if any base chain of the forward hook drops what no rule took, else ``accept``.

    ``chains`` is ``nft -j list chains``, ``legacy`` is ``iptables-legacy -S FORWARD``.
    """
    items = cast("list[dict[str, Any]]", json.loads(chains or '{"nftables": []}')["nftables"])
    for chain in (item["chain"] for item in items if "chain" in item):
        if chain.get("hook") == "forward" and chain.get("policy") == "drop":
            return "drop"
    return "drop" if re.search(r"^-P FORWARD DROP", legacy, re.MULTILINE) else "accept"


def cpu_model() -> str:
    """Empty where the kernel does not tell."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, "")


def read_kernel(root: Path = Path("/")) -> Kernel:
    """Reads ``/proc`` and ``/sys``; a file that this kernel lacks counts as its zero."""

    def text(name: str) -> str:
        try:
            return (root / name).read_text()
        except OSError:
            return ""

    status = re.search(r"^CapEff:\s*([0-9a-f]+)", text("proc/self/status"), re.MULTILINE)
    return Kernel(
        release=text("proc/sys/kernel/osrelease").strip(),
        cpus=os.cpu_count() or 1,
        filesystems=frozenset(line.split()[-1] for line in text("proc/filesystems").splitlines()),
        capabilities=int(status.group(1), 16) if status else 0,
        ip_forward=text("proc/sys/net/ipv4/ip_forward").strip() == "1",
        overcommit=int(text("proc/sys/vm/overcommit_memory") or 0),
        clocksource=text("sys/devices/system/clocksource/clocksource0/current_clocksource").strip(),
    )


def has_filesystem(kernel: Kernel, name: str, root: Path = Path("/")) -> bool:
    """Whether the kernel has the file system, or could load it."""
    if name in kernel.filesystems:
        return True
    try:
        modules = (root / "lib/modules" / kernel.release / "modules.dep").read_text()
    except OSError:
        return False
    return re.search(rf"/{re.escape(name)}\.ko", modules) is not None


def read_memory(root: Path = Path("/")) -> Memory:
    return parse_memory((root / "proc/meminfo").read_text())


def read_cgroups(root: Path = Path("/")) -> Cgroups:
    mounts = parse_mounts((root / "proc/self/mountinfo").read_text())

    def controllers_of(point: Path) -> str:
        file = root / point.relative_to("/") / "cgroup.controllers"
        return file.read_text() if file.exists() else ""

    return find_cgroups(mounts, controllers_of)


def read_disk(path: Path, root: Path = Path("/")) -> Disk:
    """The file system of ``path``, or of the nearest folder above it that exists."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    usage = shutil.disk_usage(existing)
    resolved = existing.resolve()
    mounts = parse_mounts((root / "proc/self/mountinfo").read_text())
    holding = [m for m in mounts if resolved.is_relative_to(m.point)]
    # The longest mount point holds it; of two at the same place the later one.
    # In a chroot none may: its own root is no mount of the table.
    best = max(enumerate(holding), key=lambda im: (len(im[1].point.parts), im[0]), default=None)
    return Disk(path, usage.total, usage.free, best[1].kind if best else "unknown")


def read_device(path: Path) -> Access:
    """Whether a device node can be opened; nothing is said to the device."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except FileNotFoundError:
        return Access.ABSENT
    except OSError as error:
        return Access.ABSENT if error.errno in _NO_DRIVER else Access.DENIED
    return Access.OPENS


_NO_DRIVER = {6, 19}  # ENXIO, ENODEV: a node without a driver behind it


async def _run(argv: Sequence[str]) -> Completed:
    return await run(argv, timeout=TOOL_DEADLINE, check=False)


async def read_routes(call: Run = _run) -> list[Route]:
    """Raises MissingTool without ``ip``."""
    addresses = await call(("ip", "-j", "-4", "addr"))
    routes = await call(("ip", "-j", "-4", "route", "show", "table", "all"))
    return parse_routes(addresses.stdout.decode(), routes.stdout.decode())


async def read_forward_policy(call: Run = _run) -> str:
    """``accept`` or ``drop``. Raises MissingTool without ``nft``."""
    chains = await call(("nft", "-j", "list", "chains"))
    try:
        legacy = (await call(("iptables-legacy", "-S", "FORWARD"))).stdout.decode()
    except InfraError:  # not there, so it has no rules
        legacy = ""
    return forward_policy(chains.stdout.decode() if not chains.status else "", legacy)


async def read_version(path: Path, flag: str = "--version", call: Run = _run) -> ToolVersion:
    """Asks a tool for its version; one that does not answer has none."""
    try:
        done = await call((str(path), flag))
    except (InfraError, TimeoutError, OSError):
        return ToolVersion(path, "")
    said = (done.stdout + done.stderr).decode(errors="replace")
    # runsc's from Debian is 0.0~ and the day.
    found = re.search(_DOTTED + r"(?:~[\w.]+)?", said)
    return ToolVersion(path, found.group() if found else "")
