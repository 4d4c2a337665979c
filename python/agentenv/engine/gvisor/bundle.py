"""What runsc is told of a sandbox: an OCI bundle, the command lines, the network it finds. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.engine.contract import Attachment, MachineSpec

PLATFORM = "systrap"  # never kvm: where that works QEMU does better
GUEST_DEVICE = "eth0"
FILES_LIMIT = 1 << 20
# All that runsc knows: to gVisor, root in the guest is root of the guest alone.
CAPABILITIES = (
    "CAP_AUDIT_CONTROL", "CAP_AUDIT_READ", "CAP_AUDIT_WRITE", "CAP_BLOCK_SUSPEND", "CAP_CHOWN",
    "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK",
    "CAP_IPC_OWNER", "CAP_KILL", "CAP_LEASE", "CAP_LINUX_IMMUTABLE", "CAP_MAC_ADMIN",
    "CAP_MAC_OVERRIDE", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST",
    "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYSLOG",
    "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_CHROOT", "CAP_SYS_MODULE", "CAP_SYS_NICE",
    "CAP_SYS_PACCT", "CAP_SYS_PTRACE", "CAP_SYS_RAWIO", "CAP_SYS_RESOURCE", "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG", "CAP_WAKE_ALARM",
)  # fmt: skip
# runsc mounts /dev itself.
MOUNTS = (
    ("/proc", "proc", "proc", ("nosuid", "noexec", "nodev")),
    ("/sys", "sysfs", "sysfs", ("nosuid", "noexec", "nodev")),
    ("/dev/pts", "devpts", "devpts", ("nosuid", "noexec", "mode=0620", "ptmxmode=0666", "gid=5")),
    ("/dev/shm", "tmpfs", "tmpfs", ("nosuid", "nodev", "mode=1777")),  # noqa: S108
    ("/dev/mqueue", "mqueue", "mqueue", ("nosuid", "noexec", "nodev")),
    ("/run", "tmpfs", "tmpfs", ("nosuid", "nodev", "mode=0755")),
)
# In the root, until the agent takes them away: rust/agent/src/init/container.rs, …/sudo.rs.
AGENT = ".agentenv-agent"
SUDO = ".agentenv-sudo"
KEY_VARIABLE = "AENV_CONTROL_KEY"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Names inside a machine's run folder. ``bundle`` is the OCI one, ``state`` runsc's own,
    ``upper`` where the writable disk is mounted for it."""

    run_dir: Path

    @property
    def config(self) -> Path:
        return self.run_dir / "config.json"

    @property
    def state(self) -> Path:
        return self.run_dir / "state"

    @property
    def upper(self) -> Path:
        return self.run_dir / "upper"

    @property
    def image(self) -> Path:
        """What a machine is restored from."""
        return self.run_dir / "image"

    @property
    def memory(self) -> Path:
        """What is told of the guest's memory, in place of the host's."""
        return self.run_dir / "meminfo"

    @property
    def pid(self) -> Path:
        return self.run_dir / "pid"

    @property
    def keys(self) -> Path:
        return self.run_dir / "control.keys"

    @property
    def console(self) -> Path:
        return self.run_dir / "console.log"

    @property
    def log(self) -> Path:
        return self.run_dir / "runsc.log"


def config(root: Path, key: str) -> dict[str, Any]:
    """The bundle's config.json for a sandbox whose root lies at ``root``, the agent in it."""
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [f"/{AGENT}"],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    f"{KEY_VARIABLE}={key}"],
            "cwd": "/",
            "capabilities": {
                kind: list(CAPABILITIES)
                for kind in ("bounding", "effective", "inheritable", "permitted")
            },
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": FILES_LIMIT, "soft": FILES_LIMIT}],
            "noNewPrivileges": False,
        },
        # Read-only would make the layer above it read-only, too.
        "root": {"path": str(root), "readonly": False},
        "hostname": "agentenv",
        "mounts": [
            {"destination": where, "type": kind, "source": source, "options": list(options)}
            for where, kind, source, options in MOUNTS
        ],
        "linux": {
            "namespaces": [
                *({"type": kind} for kind in ("pid", "ipc", "uts", "mount")),
                {"type": "network", "path": "/proc/self/ns/net"},  # that which runsc starts in
            ]
        },
    }  # fmt: skip


def runsc(program: Path, files: RunFiles, *words: str) -> tuple[str, ...]:
    """A command line of runsc's for the sandbox whose files these are."""
    return (
        str(program),
        f"--root={files.state}",
        f"--platform={PLATFORM}",
        "--network=sandbox",
        "--ignore-cgroups",  # ours are entered before
        f"--overlay2=root:dir={files.upper}",
        "--net-raw",
        "--net-disconnect-ok",
        f"--log={files.log}",
        *words,
    )


def hidden_sysctls() -> str:
    """Lines of shell. runsc of 2024 cannot write what kernels since 6.11 have below /proc/sys/net,
    and does without where there is nothing."""
    return "mount -t tmpfs -o ro,size=4k none /proc/sys/net\n"


def apart(script: str, *more: str) -> tuple[str, ...]:
    """A shell script in a mount namespace of its own, and in ``more`` new ones."""
    return ("unshare", "--mount", "--propagation", "slave", *more, "sh", "-ec", script)


def start(spec: MachineSpec, argv: tuple[str, ...]) -> tuple[str, ...]:
    """What becomes ``argv`` with the sandbox's disk and network around it, in namespaces that end
    with the sandbox."""
    files = RunFiles(spec.run_dir)
    disk, upper = quoted(spec.disk), quoted(files.upper)
    lines = [
        hidden_sysctls(),
        f"mount --bind {quoted(files.memory)} /proc/meminfo\n",
        f"mount -o loop,noatime {disk} {upper}\n",
    ]
    if spec.network:
        lines.append(network(spec.network))
    lines.append(f"exec {shlex.join(argv)}\n")
    return apart("".join(lines), "--net")


def network(attachment: Attachment) -> str:
    """Lines of shell inside the sandbox's namespace: the slot's tap gives way to one end of a pair,
    so that the slot's rules hold as they are; gVisor takes over the address of the other end."""
    tap, gateway = attachment.tap, attachment.gateway
    prefix = attachment.address.partition("/")[2]
    return f"""\
nsenter --net={quoted(attachment.netns)} ip -batch - <<END
link del {tap}
link add {tap} address {attachment.host_mac} mtu {attachment.mtu} type veth peer \
name {GUEST_DEVICE} address {attachment.mac} mtu {attachment.mtu} netns $$
addr add {gateway}/{prefix} dev {tap}
link set {tap} up
END
ip -batch - <<END
link set lo up
addr add {attachment.address} dev {GUEST_DEVICE}
link set {GUEST_DEVICE} up
route add default via {gateway}
END
"""


def quoted(path: Path) -> str:
    return shlex.quote(str(path))
