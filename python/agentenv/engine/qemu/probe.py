"""Does KVM run our guest here? Found by booting the real guest kernel, remembered per host boot.

`/dev/kvm` proves nothing: there are hosts where it opens and every guest hangs. The probe boots
the kernel and the initrd without disks; our init says that it misses them and powers off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.errors import AgentEnvError
from agentenv.host.process import run

DEADLINE = 6.0  # seconds; with working KVM the guest gets there in well under one
DEVICE = Path("/dev/kvm")
INIT_MARK = b"agentenv-init"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``works`` and why, for the host's boot ``boot_id`` and this QEMU."""

    works: bool
    reason: str
    boot_id: str
    qemu: str


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def kvm(
    folder: Path, qemu: Path, version: str, initrd: Callable[[], Path], kernel: Path
) -> Verdict:
    """The verdict, from memory or by a boot of a few seconds."""
    memory = folder / "kvm.json"
    try:
        known = Verdict(**json.loads(memory.read_text()))
    except (OSError, ValueError, TypeError):
        known = None
    if known and (known.boot_id, known.qemu) == (boot_id(), version):
        return known
    works, reason = await _try(qemu, kernel, initrd)
    verdict = Verdict(works, reason, boot_id(), version)
    fresh = memory.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(asdict(verdict)))
    fresh.rename(memory)
    return verdict


async def _try(qemu: Path, kernel: Path, initrd: Callable[[], Path]) -> tuple[bool, str]:
    if not DEVICE.exists():
        return False, "there is no /dev/kvm"
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return False, "/dev/kvm cannot be opened"
    argv = (
        str(qemu), "-M", "microvm,isa-serial=on,acpi=on", "-accel", "kvm", "-cpu", "host",
        "-m", "256M", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-serial", "stdio", "-kernel", str(kernel), "-initrd", str(initrd()),
        "-append", "console=ttyS0 quiet panic=-1 reboot=t",
    )  # fmt: skip
    try:
        done = await run(argv, timeout=DEADLINE, check=False)
    except TimeoutError:
        return False, f"/dev/kvm opens, but a guest did not boot within {DEADLINE:g} s"
    except AgentEnvError as error:
        return False, error.message
    if INIT_MARK in done.stdout:
        return True, "a guest booted"
    said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return False, "the guest did not reach its init: " + (said[-1] if said else "no output")
