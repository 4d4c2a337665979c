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
    # Memory in shmem: holes can be punched (balloon), and nothing is written back to a disk.
    memory = f"memory-backend-memfd,id=ram0,size={spec.memory_mib}M,share=on"
    return (
        *_machine(guest, spec, files, memory),
        "-kernel", str(guest.kernel),
        "-initrd", str(guest.initrd),
        "-append", kernel_line(guest, spec.kernel_args),
    )  # fmt: skip


def restore(guest: Guest, spec: MachineSpec, files: RunFiles) -> tuple[str, ...]:
    """As ``boot``, for a machine that waits for its devices' state; its memory is laid by
    `agentenv-map`, preloaded."""
    memory = (
        f"memory-backend-file,id=ram0,size={spec.memory_mib}M,mem-path={files.memory / 'ram'},"
        "share=off"
    )
    return (*_machine(guest, spec, files, memory), "-S", "-incoming", "defer")


def _machine(guest: Guest, spec: MachineSpec, files: RunFiles, memory: str) -> tuple[str, ...]:
    accel = "kvm" if guest.accelerator == "kvm" else f"tcg,thread=multi,tb-size={TCG_CACHE_MIB}"
    argv = [
        str(guest.qemu),
        "-name", f"agentenv-{spec.sandbox_id}",
        # The firmware that starts an ELF kernel by its PVH entry; it takes bzImages as well.
        "-bios", "qboot.rom",
        "-M", "microvm,rtc=on,isa-serial=on,acpi=on,suppress-vmdesc=on,mem-merge=off,"
              "memory-backend=ram0",
        "-accel", accel,
        "-cpu", "host" if guest.accelerator == "kvm" else EMULATED_CPU,
        "-smp", str(spec.vcpus),
        "-m", f"{spec.memory_mib}M",
        "-object", memory,
        "-global", "migration.send-configuration=off",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-chardev", f"file,id=console,path={files.console},append=on",
        "-serial", "chardev:console",
        "-chardev", f"socket,id=qmp,fd={QMP_FD},server=on,wait=off",
        "-mon", "chardev=qmp,mode=control",
        *_disks(spec, files),
        *_network(spec),
        "-chardev", f"socket,id=control,fd={CONTROL_FD},server=on,wait=off",
        "-device", "virtio-serial-device,id=serial0,max_ports=4",
        "-device", f"virtserialport,bus=serial0.0,nr=1,chardev=control,name={CONTROL_PORT}",
        "-object", "rng-random,id=entropy,filename=/dev/urandom",
        "-device", "virtio-rng-device,rng=entropy",
        "-device", "virtio-balloon-device,free-page-reporting=on,deflate-on-oom=on",
    ]  # fmt: skip
    return tuple(argv)


def _disks(spec: MachineSpec, files: RunFiles) -> tuple[str, ...]:
    assert spec.root is not None and spec.disk_base is not None, "booted from these"
    root = spec.root.segments
    driver, path = ("raw", root[0]) if len(root) == 1 else ("vmdk", files.root)
    return (
        "-blockdev",
        f"driver={driver},node-name=root,read-only=on,"
        f"file.driver=file,file.filename={path},file.locking=off,file.read-only=on",
        # A store that fails stops the guest; `proceed` lets it go on.
        "-device", "virtio-blk-device,drive=root,serial=root,rerror=stop",
        "-blockdev",
        f"driver=raw,node-name=base,read-only=on,file.driver=file,file.filename={spec.disk_base},"
        "file.locking=off,file.read-only=on",
        *_chain(spec),
        "-device",
        "virtio-blk-device,drive=disk,serial=disk,discard=on,rerror=stop,werror=stop",
    )  # fmt: skip


def _chain(spec: MachineSpec) -> list[str]:
    """The writable disk over those that are written no more."""
    words, below = list[str](), "base"
    for number, path in enumerate(spec.disk_below):
        node = f"below{number}"
        words += [
            "-blockdev",
            f"driver=qcow2,node-name={node},backing={below},read-only=on,"
            f"file.driver=file,file.filename={path},file.locking=off,file.read-only=on",
        ]
        below = node
    return [*words, "-blockdev", json.dumps(writable(DISK_NODE, spec.disk, below))]


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
