"""Every host fact that matters, each with a verdict and a remedy.

The judges are pure: a fact in, a Finding out. ``examine`` gathers the facts and asks them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Literal, TypeVar

from agentenv.config import AUTO, Config
from agentenv.errors import AgentEnvError, InfraError, MissingTool
from agentenv.host import probe
from agentenv.host.tools import SETUP, GuestKernel, Tools
from agentenv.store.objects import open_objects

T = TypeVar("T")
Verdict = Literal["ok", "warn", "fail"]
MIB, GIB = 1 << 20, 1 << 30

OLDEST_KERNEL = (5, 10)  # pidfd, cgroup v2 delegation, clean mounts; what Debian 11 runs
NEEDED_CAPABILITIES = {  # bit -> what for
    12: "CAP_NET_ADMIN (taps, firewall)",
    21: "CAP_SYS_ADMIN (namespaces, mounts)",
    7: "CAP_SETUID (engines run under users of their own)",
    0: "CAP_CHOWN (files of those users)",
}
RESENDING_KERNEL = (6, 9)  # FUSE_NOTIFY_RESEND and FUSE passthrough
CONTROLLERS = ("cpu", "memory", "pids")
SERVER_MEMORY = 256 * MIB  # the node's own processes
LEAST_DISK = 2 * GIB  # an image, its conversion and one sandbox's writes
SLOT_PREFIX = 31  # a route of this length inside the uplink range is a slot of ours


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it stands, what was found, what to do (empty when ok)."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tool, the version flag it understands, the oldest version, how bad its absence is."""

    name: str
    flag: str
    oldest: tuple[int, ...]
    without: Literal["warn", "fail"]
    purpose: str


WANTED = (
    Wanted("qemu-system-x86_64", "--version", (8, 2), "fail", "runs sandboxes"),
    Wanted("qemu-img", "--version", (7, 2), "fail", "makes their disks"),
    Wanted("runsc", "--version", (), "warn", "runs sandboxes in gVisor"),
    Wanted("mkfs.ext4", "-V", (1, 46), "fail", "formats their disks"),
    Wanted("nft", "--version", (1, 0), "fail", "keeps sandboxes apart"),
    Wanted("ip", "-V", (), "fail", "tells the host's networks"),
    Wanted("mmdebstrap", "--version", (), "warn", "images from Debian packages"),
)
FILESYSTEMS = ("erofs", "overlay", "fuse")
OWN_PROGRAMS = ("agentenv-agent", "agentenv-blockd", "agentenv-edge", "agentenv-sudo")


def judge_kernel(kernel: probe.Kernel) -> Finding:
    found = f"Linux {kernel.release}, {kernel.cpus} CPUs, clock {kernel.clocksource or 'unknown'}"
    if kernel.version < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        return Finding("kernel", "fail", found, f"run Linux {oldest} or newer")
    return Finding("kernel", "ok", found)


def judge_privileges(kernel: probe.Kernel) -> Finding:
    lacking = [
        why for bit, why in NEEDED_CAPABILITIES.items() if not kernel.capabilities >> bit & 1
    ]
    if lacking:
        remedy = "run as root; in a container, privileged"
        return Finding("privileges", "fail", "without " + ", ".join(lacking), remedy)
    return Finding("privileges", "ok", "all that are needed")


def judge_overcommit(kernel: probe.Kernel) -> Finding:
    if kernel.overcommit == 2:
        return Finding(
            "memory overcommit",
            "warn",
            "vm.overcommit_memory=2: each sandbox counts with its full memory",
            "sysctl vm.overcommit_memory=0",
        )
    return Finding("memory overcommit", "ok", f"vm.overcommit_memory={kernel.overcommit}")


def judge_kvm(access: probe.Access, works: bool, reason: str) -> Finding:
    """``works`` and ``reason`` come from a real boot of the guest kernel."""
    if works:
        return Finding("kvm", "ok", reason or "a guest boots with it")
    slow = "under QEMU sandboxes are emulated"
    remedy = {
        probe.Access.ABSENT: "enable virtualisation (firmware, or nested in the hypervisor) "
        "and load kvm_intel or kvm_amd",
        probe.Access.DENIED: "let this user open /dev/kvm (group kvm), or run as root",
        probe.Access.OPENS: "nested virtualisation below is broken; use another instance type",
    }[access]
    found = f"/dev/kvm {access}" + (f", {reason}" if reason else "")
    return Finding("kvm", "warn", f"{found}: {slow}", remedy)


def judge_engine(wanted: str, kvm: bool, gvisor: AgentEnvError | None) -> Finding:
    """What runs the sandboxes of a node here; ``gvisor`` is why that cannot."""
    name = "engine"
    if wanted == "gvisor" and gvisor:
        return Finding(
            name, "fail", f"{gvisor.message}: {gvisor.why}", "engine = auto, or: " + SETUP
        )
    if wanted != AUTO:
        return Finding(name, "ok", f"{wanted}, as the configuration names it")
    if kvm:
        return Finding(name, "ok", "qemu with KVM")
    if gvisor is None:
        return Finding(name, "ok", "gvisor, at native speed without KVM")
    found = f"qemu without KVM, emulated: 20 times as slow at computing; {gvisor.message}"
    return Finding(name, "warn", found, SETUP)


def judge_memory(memory: probe.Memory, sandbox: int) -> Finding:
    """``sandbox`` is the memory of one sandbox of default size, in bytes."""
    room = max(0, memory.available - SERVER_MEMORY) // sandbox
    found = (
        f"{memory.available // MIB} of {memory.total // MIB} MiB available, "
        f"{memory.swap // MIB} MiB swap; {room} sandboxes of {sandbox // MIB} MiB in full"
    )
    if room < 1:
        return Finding("memory", "fail", found, "free memory, or lower memory_mib")
    return Finding("memory", "ok", found)


def judge_disk(disk: probe.Disk) -> Finding:
    found = f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB free at {disk.path} ({disk.kind})"
    if disk.kind in {"tmpfs", "ramfs"}:
        return Finding("disk", "warn", found, "set AENV_HOME to a disk: this one is memory")
    if disk.free < LEAST_DISK:
        return Finding(
            "disk", "fail", found, f"free {LEAST_DISK // GIB} GiB, or set AENV_HOME elsewhere"
        )
    return Finding("disk", "ok", found)


def judge_cgroups(cgroups: probe.Cgroups) -> Finding:
    versions = {name: cgroups.version_of(name) for name in CONTROLLERS}
    found = ", ".join(f"{name}: v{version}" for name, version in versions.items() if version)
    lacking = [name for name, version in versions.items() if version is None]
    if lacking:
        return Finding(
            "cgroups",
            "fail",
            f"no controller {', '.join(lacking)}" + (f" ({found})" if found else ""),
            "mount cgroup2 at /sys/fs/cgroup; in a container, with a writable cgroup of its own",
        )
    return Finding("cgroups", "ok", found)


def judge_filesystems(present: Mapping[str, bool]) -> Finding:
    """File systems of the host's own kernel; guests bring theirs."""
    found = ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in present.items())
    if lacking := [name for name, has in present.items() if not has]:
        what = "images cannot be mounted on this host to look into; sandboxes do not need it"
        return Finding("file systems", "warn", f"{found}; {what}", f"modprobe {' '.join(lacking)}")
    return Finding("file systems", "ok", found)


def judge_devices(tun: probe.Access, fuse: probe.Access) -> Finding:
    faults: list[str] = []
    if tun is not probe.Access.OPENS:
        faults.append(f"/dev/net/tun {tun}")
    if fuse is not probe.Access.OPENS:
        faults.append(f"/dev/fuse {fuse}")
    if not faults:
        return Finding("devices", "ok", "/dev/net/tun and /dev/fuse open")
    # Without taps no sandbox has a network; FUSE is only for what is read on demand.
    verdict: Verdict = "fail" if tun is not probe.Access.OPENS else "warn"
    remedy = "modprobe tun fuse; in a container, pass the devices in"
    return Finding("devices", verdict, ", ".join(faults), remedy)


def judge_uplink(uplink: IPv4Network, routes: Iterable[probe.Route]) -> Finding:
    """The range that slots take their host-side addresses from must be free on this host."""
    name = "uplink addresses"
    own = [route for route in routes if not _is_slot(route, uplink)]
    if met := [route for route in own if route.network.overlaps(uplink)]:
        return Finding(
            name, "fail", f"{uplink} overlaps {_listed(met)}", "set uplink_network to a free range"
        )
    return Finding(name, "ok", f"{uplink} is free")


def judge_inner(inner: IPv4Network, uplink: IPv4Network, routes: Iterable[probe.Route]) -> Finding:
    """The guests' own range exists only inside them, but hides the same addresses outside."""
    name = "inner addresses"
    if inner.overlaps(uplink):
        return Finding(
            name, "fail", f"{inner} overlaps uplink_network {uplink}", "choose disjoint ranges"
        )
    if met := [route for route in routes if route.network.overlaps(inner)]:
        return Finding(
            name,
            "warn",
            f"{inner} overlaps {_listed(met)}, which sandboxes cannot reach then",
            "set inner_network to a range that nothing here uses",
        )
    return Finding(name, "ok", f"{inner} is free")


def _is_slot(route: probe.Route, uplink: IPv4Network) -> bool:
    return route.network.prefixlen >= SLOT_PREFIX and route.network.subnet_of(uplink)


def _listed(routes: Sequence[probe.Route]) -> str:
    return ", ".join(f"{route.network} ({route.device or 'no device'})" for route in routes[:4])


def judge_forwarding(policy: str, ip_forward: bool) -> Finding:
    found = f"policy {policy}, ip_forward {'on' if ip_forward else 'off'}"
    if policy == "drop":
        found += " (as Docker sets it): accept rules of our own are added while the node serves"
    elif not ip_forward:
        found += ": turned on when the node serves"
    return Finding("forwarding", "ok", found)


def judge_tool(wanted: Wanted, tool: probe.ToolVersion | None) -> Finding:
    if tool is None:
        found = f"missing ({wanted.purpose})"
        return Finding(wanted.name, wanted.without, found, SETUP)
    found = f"{tool.version or 'version unknown'} at {tool.path}"
    if wanted.oldest and tool.numbers < wanted.oldest:
        oldest = ".".join(map(str, wanted.oldest))
        return Finding(wanted.name, wanted.without, f"{found}, {oldest} is needed", SETUP)
    return Finding(wanted.name, "ok", found)


def judge_guest_kernel(kernel: GuestKernel | MissingTool) -> Finding:
    if isinstance(kernel, MissingTool):
        return Finding("guest kernel", "fail", f"{kernel.what}: {kernel.why}", kernel.fix)
    found = f"{kernel.version}, {len(kernel.modules)} modules at {kernel.image.parent}"
    return Finding("guest kernel", "ok", found)


def judge_block_server(kernel: probe.Kernel) -> Finding:
    release = ".".join(map(str, kernel.version[:2]))
    if kernel.version < RESENDING_KERNEL:
        oldest = ".".join(map(str, RESENDING_KERNEL))
        found = f"Linux {release} does not deliver reads again that a dead block server had"
        return Finding("block server", "warn", found, f"Linux {oldest} does, and is faster")
    return Finding("block server", "ok", f"Linux {release}: reads outlive it")


def judge_store(url: str, error: AgentEnvError | None) -> Finding:
    if error is not None:
        return Finding("store", "fail", error.message, error.fix or "aenv config shows the store")
    return Finding("store", "ok", url)


def judge_program(name: str, path: Path | MissingTool) -> Finding:
    if isinstance(path, MissingTool):
        return Finding(name, "fail", path.why, path.fix)
    return Finding(name, "ok", str(path))


async def examine(
    config: Config,
    tools: Tools,
    probe_kvm: Callable[[], Awaitable[tuple[bool, str]]],
    try_gvisor: Callable[[], Awaitable[None]],
) -> list[Finding]:
    """All findings, in the order in which a person would mend them.

    ``probe_kvm`` boots the guest kernel with KVM and says whether it came up, and what it saw;
    if it cannot be asked (its tools are missing) that is a finding too. ``try_gvisor`` raises what
    keeps gVisor from running a program.
    """
    kernel = await asyncio.to_thread(probe.read_kernel)
    memory = await asyncio.to_thread(probe.read_memory)
    disk = await asyncio.to_thread(probe.read_disk, config.home)
    cgroups = await asyncio.to_thread(probe.read_cgroups)
    return [
        judge_kernel(kernel),
        judge_privileges(kernel),
        *await _engines(config.engine, probe_kvm, try_gvisor),
        *await asyncio.gather(*(_tool(wanted, tools) for wanted in WANTED)),
        judge_guest_kernel(_or_missing(tools.kernel)),
        *(
            judge_program(name, _or_missing(lambda n=name: tools.binary(n)))
            for name in OWN_PROGRAMS
        ),
        judge_memory(memory, config.memory_mib * MIB),
        judge_overcommit(kernel),
        judge_disk(disk),
        judge_cgroups(cgroups),
        judge_filesystems({name: probe.has_filesystem(kernel, name) for name in FILESYSTEMS}),
        judge_devices(
            probe.read_device(Path("/dev/net/tun")), probe.read_device(Path("/dev/fuse"))
        ),
        judge_block_server(kernel),
        judge_store(config.store_url, await _ask_store(config.store_url)),
        *await _network(config, kernel),
    ]


async def _ask_store(url: str) -> AgentEnvError | None:
    """Whether a remote store answers. A directory is made when it is needed, not by a look."""
    if not url.startswith("s3://"):
        return None
    try:
        await (await open_objects(url)).head("claim/doctor")
    except AgentEnvError as error:
        return error
    return None


async def _engines(
    wanted: str,
    probe_kvm: Callable[[], Awaitable[tuple[bool, str]]],
    try_gvisor: Callable[[], Awaitable[None]],
) -> list[Finding]:
    access = probe.read_device(Path("/dev/kvm"))
    try:
        works, reason = await probe_kvm()
    except InfraError as error:
        works, reason = False, f"not probed: {error.message}"
    gvisor: AgentEnvError | None = None
    try:
        await try_gvisor()
    except AgentEnvError as error:
        gvisor = error
    return [judge_kvm(access, works, reason), judge_engine(wanted, works, gvisor)]


async def _tool(wanted: Wanted, tools: Tools) -> Finding:
    path = _or_missing(lambda: tools.find(wanted.name))
    if isinstance(path, MissingTool):
        return judge_tool(wanted, None)
    return judge_tool(wanted, await probe.read_version(path, wanted.flag))


async def _network(config: Config, kernel: probe.Kernel) -> list[Finding]:
    inner, uplink = IPv4Network(config.inner_network), IPv4Network(config.uplink_network)
    try:
        routes = await probe.read_routes()
        policy = await probe.read_forward_policy()
    except InfraError as error:  # the missing tool has its own finding with its remedy
        return [Finding("network", "fail", error.message, SETUP)]
    return [
        judge_uplink(uplink, routes),
        judge_inner(inner, uplink, routes),
        judge_forwarding(policy, kernel.ip_forward),
    ]


def _or_missing(look: Callable[[], T]) -> T | MissingTool:
    try:
        return look()
    except MissingTool as error:
        return error
