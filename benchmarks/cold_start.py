"""From the request to the first command's answer, by phase, with each phase's floor."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections import defaultdict

from tests.server import TestServer

from agentenv.config import load
from agentenv.engine.qemu.argv import TCG_KERNEL
from agentenv.host.tools import Tools
from benchmarks.machine import heading, pss_of, row

ROUNDS = 5
FLOORS = {
    "slot": "0: prepared ahead",
    "queue": "0: nobody waits",
    "record": "one synced transaction",
    "open": "a round trip to the block server, copy of a 200 KB file",
    "process": "exec of QEMU to its first socket",
    "boot": "the same kernel to its init, without devices (last line)",
    "init": "one round trip, clock, entropy, addresses",
    "publish": "two round trips to the data plane",
}


def run(server: TestServer) -> None:
    phases: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        made = server.create("base", timeout=600)["sandboxID"]
        phases["request to answer"].append(time.perf_counter() - begun)
        done = server.cli("exec", made, "--", "true", check=True)
        assert done.returncode == 0
        phases["request to first command's end"].append(time.perf_counter() - begun)
        for name, seconds in server.inspect(made)["phases"].items():
            phases[name].append(seconds)
        if len(phases["slot"]) == ROUNDS:
            _memory(server, made)
        server.cli("kill", made, check=True)
    total = statistics.median(phases["request to answer"])
    heading("phase", "median", "share", "its floor")
    for name, values in phases.items():
        median = statistics.median(values)
        row(name, f"{median * 1e3:.1f} ms", f"{median / total:.2f}", FLOORS.get(name, ""))
    floor = statistics.median(_bare_boot(server) for _ in range(3))
    row(
        "bare kernel to init", f"{floor * 1e3:.0f} ms", f"{floor / total:.2f}", "no device, no disk"
    )


def _bare_boot(server: TestServer) -> float:
    """The guest's kernel to our init, which ends for want of a disk; seconds to its first word."""
    config = load({"home": server.home}, {})
    initrd = next((config.home / "engine").glob("initrd-*"))
    tools = Tools.from_environ()
    argv = [
        tools.find("qemu-system-x86_64"), "-M", "microvm,rtc=on,isa-serial=on,acpi=on",
        "-bios", "qboot.rom", "-accel", "tcg", "-cpu", "max", "-m", "512M", "-nodefaults",
        "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
        "-kernel", tools.kernel().image, "-initrd", initrd,
        "-append", " ".join(("console=ttyS0 panic=-1 reboot=t no_timer_check loglevel=7", *TCG_KERNEL)),
    ]  # fmt: skip
    begun = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        while b"Run /init" not in (line := child.stdout.readline()):
            assert line, "the kernel ended"
        taken = time.perf_counter() - begun
        child.kill()
    return taken


def _memory(server: TestServer, sandbox_id: str) -> None:
    """The agent's own memory and what an idle sandbox costs the host."""
    script = (
        "for p in $(pgrep -x init); do grep -H VmRSS /proc/$p/status; done; free -k | sed -n 2p"
    )
    text = server.cli("exec", sandbox_id, "-u", "root", "--", "sh", "-c", script, check=True).stdout
    pid = server.inspect(sandbox_id)["objects"]["pid"]
    agents = [int(line.split()[1]) for line in text.decode().splitlines() if "VmRSS" in line]
    print(f"agent memory: {sum(agents)} kB resident (init and agent); "
          f"QEMU with an idle guest of 512 MiB: {pss_of([pid]):.0f} MiB Pss on the host\n")  # fmt: skip
