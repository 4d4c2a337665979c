"""Suspension against what others have: `docker run`, `docker pause`, QEMU's migration to a file.

Docker's container has busybox alone, no network, and keeps its memory while it is paused; QEMU's
machine is of our shape (microvm, 512 MiB), with a guest of kernel and busybox that fills memory.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.server import TestServer

from agentenv import _core
from agentenv.engine.qemu import initrd
from benchmarks.machine import heading, row, timed
from benchmarks.peers import docker_image

ROUNDS = 10
DIRTY = (0, 50, 200)  # MB of fresh pages
TEMPLATE = "bench-peers"
KERNEL = Path(os.environ.get("AENV_TOOLS", "/opt/agentenv")) / "kernel/vmlinux"
# Without a rate some boots measure the counter for ever.
BOOT = "console=ttyS0 quiet no_timer_check tsc_early_khz={khz} tsc=reliable"
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox dd if=/dev/urandom of=/one bs=64k count=16
n=0
while [ $n -lt {megabytes} ]; do /bin/busybox cat /one >> /pages; n=$((n + 1)); done
echo FILLED > /dev/ttyS0
while :; do /bin/busybox sleep 1; done
"""


def run(server: TestServer) -> None:
    source = server.create("base", timeout=3600)["sandboxID"]
    _post(server, source, "snapshots", name=TEMPLATE)
    server.api("DELETE", f"/sandboxes/{source}")
    try:
        heading("what", "median", "others'", "ratio")
        _starts(server)
        for megabytes in DIRTY:
            _saves(server, megabytes)
    finally:
        server.api("DELETE", f"/templates/{TEMPLATE}")


def _starts(server: TestServer) -> None:
    def start() -> None:
        made = server.create(TEMPLATE, timeout=600)["sandboxID"]
        server.api("DELETE", f"/sandboxes/{made}")

    ours = statistics.median(timed(start, ROUNDS))
    with docker_image() as image:
        if not image:
            print("(no docker here: not compared; apt-get install docker.io, and start dockerd)")
            return
        argv = ["docker", "run", "--rm", "--network=none", image, "/bin/true"]
        theirs = statistics.median(timed(lambda: _quiet(argv), ROUNDS))
        _compare("sandbox from a template and gone: docker run --rm", ours, theirs)
        argv = ["docker", "run", "-d", "--network=none", image, "/bin/sleep", "3600"]
        name = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

        def pause() -> None:
            _quiet(["docker", "pause", name])
            _quiet(["docker", "unpause", name])

        try:
            theirs = statistics.median(timed(pause, ROUNDS))
        finally:
            _quiet(["docker", "rm", "-f", name])
    made = server.create(TEMPLATE, timeout=600)["sandboxID"]

    def suspend() -> None:
        _post(server, made, "pause")
        _post(server, made, "connect", timeout=600)

    ours = statistics.median(timed(suspend, ROUNDS))
    server.api("DELETE", f"/sandboxes/{made}")
    _compare("pause and back: docker pause, unpause (nothing is saved)", ours, theirs)


def _saves(server: TestServer, megabytes: int) -> None:
    durable: list[float] = []
    resumed: list[float] = []
    for _ in range(ROUNDS):
        made = server.create(TEMPLATE, timeout=600)["sandboxID"]
        if megabytes:
            fill = f"head -c {megabytes}M /dev/urandom > /dev/shm/dirty"
            server.cli("exec", made, "--", "sh", "-c", fill, check=True)
        _post(server, made, "pause")
        phases = server.inspect(made)["phases"]
        steps = ("pause.cut", "save.stopped", "save.write", "pause.record")
        durable.append(sum(phases[step] for step in steps))
        _post(server, made, "connect", timeout=600)
        phases = server.inspect(made)["phases"]
        resumed.append(sum(phases[step] for step in ("slot", "queue", "open", "process")))
        server.api("DELETE", f"/sandboxes/{made}")
    with _plain(megabytes) as plain:
        saved = [plain.save() for _ in range(ROUNDS)]
        restored = [plain.restore() for _ in range(ROUNDS)]
    median = statistics.median
    _compare(f"saved, {megabytes} MB dirty: QEMU migrate file:", median(durable), median(saved))
    _compare("restored until it runs: QEMU -incoming file:", median(resumed), median(restored))


class Plain:
    """A QEMU without us, saved by its own migration."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._state = folder / "state"
        self._khz = _core.tsc_khz(20)
        self._first = self._started()

    def _started(self, *more: str) -> Callable[..., dict]:
        control = self._folder / f"qmp-{time.monotonic_ns()}"
        argv = [
            "qemu-system-x86_64", "-M", "microvm,rtc=on,acpi=on", "-accel", "tcg", "-cpu", "max", "-m", "512M",
            "-kernel", KERNEL, "-initrd", self._folder / "initrd", "-nodefaults", "-display", "none",
            "-append", BOOT.format(khz=self._khz), "-serial", f"file:{self._folder}/console",
            "-qmp", f"unix:{control},server=on,wait=off", *more,
        ]  # fmt: skip
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        while not control.exists():
            assert process.poll() is None, "QEMU ended"
            time.sleep(0.001)
        link = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        link.connect(str(control))
        lines = link.makefile("rw")
        json.loads(lines.readline())

        def ask(command: str, **arguments: object) -> dict:
            lines.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
            lines.flush()
            while "event" in (answer := json.loads(lines.readline())):
                pass
            return answer["return"]

        ask("qmp_capabilities")
        return ask

    def filled(self) -> None:
        console = self._folder / "console"
        while "FILLED" not in console.read_text(errors="replace"):
            time.sleep(0.05)

    def save(self) -> float:
        begun = time.perf_counter()
        self._first("stop")
        self._first("migrate", uri=f"file:{self._state}")
        while self._first("query-migrate")["status"] != "completed":
            time.sleep(0.001)
        took = time.perf_counter() - begun
        self._first("cont")
        return took

    def restore(self) -> float:
        begun = time.perf_counter()
        ask = self._started("-incoming", f"file:{self._state}", "-S")
        while ask("query-status")["status"] not in ("paused", "running"):
            time.sleep(0.001)
        ask("cont")
        took = time.perf_counter() - begun
        ask("quit")
        return took


@contextmanager
def _plain(megabytes: int) -> Iterator[Plain]:
    folder = Path(tempfile.mkdtemp(prefix="aenv-bench-qemu-", dir="/var/tmp"))
    try:
        (folder / "initrd").write_bytes(_initrd(INIT.format(megabytes=megabytes)))
        with ExitStack() as stack:
            plain = Plain(folder, stack)
            plain.filled()
            yield plain
    finally:
        shutil.rmtree(folder)


def _initrd(init: str) -> bytes:
    members = [
        ("dev", initrd.MODE_DIR, b"", (0, 0)),
        ("dev/console", initrd.MODE_CHAR, b"", (5, 1)),
        ("bin", initrd.MODE_DIR, b"", (0, 0)),
        ("bin/busybox", initrd.MODE_FILE, Path("/bin/busybox").read_bytes(), (0, 0)),
        ("init", initrd.MODE_FILE, init.encode(), (0, 0)),
        ("TRAILER!!!", 0, b"", (0, 0)),
    ]
    return b"".join(
        initrd.entry(name, mode, data, number, device)
        for number, (name, mode, data, device) in enumerate(members, 1)
    )


def _quiet(argv: list[str]) -> None:
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def _post(server: TestServer, sandbox_id: str, verb: str, **body: object) -> None:
    answer = server.api("POST", f"/sandboxes/{sandbox_id}/{verb}", json=body)
    assert answer.status_code < 300, answer.text


def _compare(name: str, ours: float, theirs: float) -> None:
    row(name, f"{ours * 1e3:.1f} ms", f"{theirs * 1e3:.1f} ms", f"{ours / theirs:.2f} ×")
