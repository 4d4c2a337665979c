"""From a machine's specification to QEMU's command line. Pure.

The same devices in the same order in every machine, so that a saved device state fits any of
them: root disk, writable disk, network, serial (control), entropy, balloon.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.engine.contract import MachineSpec

SECTOR = 512
CONTROL_PORT = "agentenv.control"
DISK_NODE = "disk"  # the first node that the guest writes; those put over it later begin so
EMULATED_CPU = "max"
MEMORY = "ram0"
# Descriptors in QEMU: sockets that listen already, so nobody who connects is too early; the tap.
QMP_FD, CONTROL_FD, NET_FD = 3, 4, 5
TCG_CACHE_MIB = 128  # translated code; QEMU's own default (1 GiB) is no bound on a crowded node

# For emulated CPUs only; each saves 0.1-0.45 s of a boot of 2.2 s: mitigations protect nothing
# where the guest has no speculation of its own; self-tests of the kernel's ciphers; keys for
# signatures on modules, which come from our initrd; a second random generator beside virtio-rng.
TCG_KERNEL = (
    "mitigations=off",
    "cryptomgr.notests",
    "initcall_blacklist=load_system_certificate_list,jent_mod_init",
)

_VMDK = """\
# Disk DescriptorFile
version=1
CID=fffffffe
parentCID=ffffffff
createType="twoGbMaxExtentFlat"
# Extents: no empty line may come before them, QEMU would read the next line twice
{extents}
ddb.adapterType = "ide"
"""


@dataclass(frozen=True, slots=True)
class Guest:
    """What every machine of this node boots: kernel, initrd, and how the CPU is provided."""

    qemu: Path
    kernel: Path
    initrd: Path
    accelerator: str  # kvm | tcg
    tsc_khz: int


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The engine's files below ``run_dir``."""

    run_dir: Path

    @property
    def qmp(self) -> Path:
        return self.run_dir / "qmp.sock"

    @property
    def control(self) -> Path:
        return self.run_dir / "control.sock"

    @property
    def console(self) -> Path:
        return self.run_dir / "console.log"

    @property
    def root(self) -> Path:
        return self.run_dir / "root.vmdk"

    @property
    def log(self) -> Path:
        return self.run_dir / "qemu.log"

    @property
    def memory(self) -> Path:
        """What `agentenv-map` lays a restored guest's memory by (rust/map)."""
        return self.run_dir / "memory"

    @property
    def devices(self) -> Path:
        """The devices' state, on its way into or out of QEMU."""
        return self.run_dir / "devices"


def vmdk(segments: tuple[tuple[Path, int], ...]) -> str:
    """A descriptor that shows files (path, bytes) as one flat disk, without copying them.

    Raises ValueError for a size that is no multiple of a sector, or a path with a quote.
    """
    lines: list[str] = []
    for path, size in segments:
        if size % SECTOR or '"' in str(path):
            raise ValueError(f"{path} ({size} bytes) cannot be an extent")
        lines.append(f'RW {size // SECTOR} FLAT "{path}" 0')
    return _VMDK.format(extents="\n".join(lines))


def kernel_line(guest: Guest, extra: tuple[str, ...]) -> str:
    """Arguments of the guest's kernel.

    The three about time: without them calibration against an emulated timer hangs under load
    (DESIGN.md, measured).
    """
    words = [
        "console=ttyS0", "quiet", "loglevel=4", "panic=-1", "reboot=t", "i8042.noaux",
        "no_timer_check", f"tsc_early_khz={guest.tsc_khz}", "tsc=reliable",
        "random.trust_cpu=on", "cgroup_no_v1=all", "rootfstype=ramfs",
    ]  # fmt: skip
    if guest.accelerator == "tcg":
        words += TCG_KERNEL
    return " ".join((*words, *extra))


def boot(guest: Guest, spec: MachineSpec, files: RunFiles) -> tuple[str, ...]:
    """The command line of a machine that boots. The tap, if any, is descriptor ``NET_FD``."""
    return (
        *_machine(guest, spec, files, f",memory-backend={MEMORY}"),
        # Memory in shmem: holes can be punched (balloon), and nothing is written back to a disk.
        "-object", f"memory-backend-memfd,id={MEMORY},size={spec.memory_mib}M,share=on",
        *(word for node in disks(spec, files) for word in ("-blockdev", json.dumps(node))),
        "-kernel", str(guest.kernel),
        "-initrd", str(guest.initrd),
        "-append", kernel_line(guest, spec.kernel_args),
    )  # fmt: skip


def wait(guest: Guest, spec: MachineSpec, files: RunFiles) -> tuple[str, ...]:
    """As ``boot``, for a machine that waits to be given memory, disks and its devices' state."""
    return (*_machine(guest, spec, files), "--preconfig", "-S", "-incoming", "defer")


def memory(spec: MachineSpec, files: RunFiles) -> dict[str, Any]:
    """What a restored machine has for memory: a file that `agentenv-map`, preloaded, replaces."""
    return {
        "qom-type": "memory-backend-file",
        "id": MEMORY,
        "size": spec.memory_mib << 20,
        "mem-path": str(files.memory / "ram"),
        "share": False,
    }


def _machine(
    guest: Guest, spec: MachineSpec, files: RunFiles, options: str = ""
) -> tuple[str, ...]:
    accel = "kvm" if guest.accelerator == "kvm" else f"tcg,thread=multi,tb-size={TCG_CACHE_MIB}"
    argv = [
        str(guest.qemu),
        "-name", f"agentenv-{spec.sandbox_id}",
        # The firmware that starts an ELF kernel by its PVH entry; it takes bzImages as well.
        "-bios", "qboot.rom",
        "-M", f"microvm,rtc=on,isa-serial=on,acpi=on,suppress-vmdesc=on,mem-merge=off{options}",
        "-accel", accel,
        "-cpu", "host" if guest.accelerator == "kvm" else EMULATED_CPU,
        "-smp", str(spec.vcpus),
        "-m", f"{spec.memory_mib}M",
        "-global", "migration.send-configuration=off",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-chardev", f"file,id=console,path={files.console},append=on",
        "-serial", "chardev:console",
        "-chardev", f"socket,id=qmp,fd={QMP_FD},server=on,wait=off",
        "-mon", "chardev=qmp,mode=control",
        # A store that fails stops the guest; `proceed` lets it go on.
        "-device", "virtio-blk-device,drive=root,serial=root,rerror=stop",
        "-device",
        f"virtio-blk-device,drive={DISK_NODE},serial=disk,discard=on,rerror=stop,werror=stop",
        *_network(spec),
        "-chardev", f"socket,id=control,fd={CONTROL_FD},server=on,wait=off",
        "-device", "virtio-serial-device,id=serial0,max_ports=4",
        "-device", f"virtserialport,bus=serial0.0,nr=1,chardev=control,name={CONTROL_PORT}",
        "-object", "rng-random,id=entropy,filename=/dev/urandom",
        "-device", "virtio-rng-device,rng=entropy",
        "-device", "virtio-balloon-device,free-page-reporting=on,deflate-on-oom=on",
    ]  # fmt: skip
    return tuple(argv)


def disks(spec: MachineSpec, files: RunFiles) -> list[dict[str, Any]]:
    """The block nodes of a machine, each after those that it lies over."""
    assert spec.root is not None and spec.disk_base is not None, "made from these"
    root = spec.root.segments
    driver, path = ("raw", root[0]) if len(root) == 1 else ("vmdk", files.root)
    found = [_sealed("root", driver, path), _sealed("base", "raw", spec.disk_base)]
    below = "base"
    for number, path in enumerate(spec.disk_below):
        found.append(_sealed(f"below{number}", "qcow2", path) | {"backing": below})
        below = f"below{number}"
    return [*found, writable(DISK_NODE, spec.disk, below)]


def _sealed(node: str, driver: str, path: Path) -> dict[str, Any]:
    """A file that nobody writes."""
    return {
        "driver": driver,
        "node-name": node,
        "read-only": True,
        "file": {"driver": "file", "filename": str(path), "locking": "off", "read-only": True},
    }


def writable(node: str, path: Path, below: str | None) -> dict[str, Any]:
    """A qcow2 that the guest writes; without ``below`` it is put over another one later.

    Flushes end in the host's page cache: a sandbox does not outlive its host, only its processes,
    and a guest's fsync would make it wait for everybody's writes.
    """
    flags = {"no-flush": True, "direct": False}
    return {
        "driver": "qcow2",
        "node-name": node,
        "backing": below,
        "discard": "unmap",
        "cache": flags,
        "file": {
            "driver": "file",
            "filename": str(path),
            "aio": "threads",
            "cache": flags,
            "locking": "off",
            "discard": "unmap",
        },
    }


def _network(spec: MachineSpec) -> tuple[str, ...]:
    if spec.network is None:
        return ()
    return (
        "-netdev", f"tap,id=net0,fd={NET_FD}",
        "-device", f"virtio-net-device,netdev=net0,mac={spec.network.mac}",
    )  # fmt: skip
