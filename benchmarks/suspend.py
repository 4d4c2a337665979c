"""Pause, resume, snapshot, fork: by phase, against a cold boot of the same image, in one run."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.server import TestServer

from agentenv.sdk.sync import AgentEnv
from benchmarks.machine import heading, row

ROUNDS = 20
CYCLES = 100
DIRTY = (0, 50, 200)  # MB of fresh pages
DISKS = (1, 256, 2048)  # MB written
TEMPLATE = "bench-template"


def run(server: TestServer) -> None:
    source = server.create("base", timeout=3600, diskSizeMB=8192)["sandboxID"]
    boot = server.inspect(source)["phases"]
    _post(server, source, "snapshots", name=TEMPLATE)
    try:
        heading("what", "median", "p99", "against")
        booted = boot["boot"] + boot["process"] + boot["init"]
        row("cold boot of the image, guest only", f"{booted * 1e3:.0f} ms", "", "")
        _templates(server, booted)
        _pauses(server)
        _snapshots(server)
        _disks(server)
        _forks(server)
        _cycles(server)
        _memory(server)
    finally:
        server.api("DELETE", f"/sandboxes/{source}")
        server.api("DELETE", f"/templates/{TEMPLATE}")


def _templates(server: TestServer, booted: float) -> None:
    found: dict[str, list[float]] = defaultdict(list)
    with AgentEnv(server.url, server.key) as env:
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            sandbox = env.start(TEMPLATE)
            started = time.perf_counter()
            assert sandbox.commands.run("true").exit_code == 0
            ended = time.perf_counter()
            found["by SDK: request to the first command's end"].append(ended - begun)
            found["– of it that command, translated anew"].append(ended - started)
            sandbox.kill()
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        made = _made(server)
        found["create from a template: request to answer"].append(time.perf_counter() - begun)
        phases = server.inspect(made)["phases"]
        before = ("slot", "record", "queue", "open", "process")
        found["– of it until the guest runs"].append(sum(phases[name] for name in before))
        found["– of it the guest's first answer"].append(phases["init"])
        server.api("DELETE", f"/sandboxes/{made}")
    for name, values in found.items():
        _row(name, values, f"boot: {statistics.median(values) / booted:.2f} ×")


def _pauses(server: TestServer) -> None:
    for megabytes in DIRTY:
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(ROUNDS if megabytes < 100 else ROUNDS // 2):
            made = _made(server)
            _dirty(server, made, megabytes)
            begun = time.perf_counter()
            _post(server, made, "pause")
            found["request to answer"].append(time.perf_counter() - begun)
            phases = server.inspect(made)["phases"]
            durable = ("pause.cut", "save.stopped", "save.write", "pause.record")
            found["until durable"].append(sum(phases[name] for name in durable))
            begun = time.perf_counter()
            _post(server, made, "connect", timeout=600)
            found["resume"].append(time.perf_counter() - begun)
            server.api("DELETE", f"/sandboxes/{made}")
        for name, values in found.items():
            _row(f"pause with {megabytes} MB dirty: {name}", values)


def _snapshots(server: TestServer) -> None:
    for megabytes in DIRTY:
        stopped: list[float] = []
        made = _made(server)
        _dirty(server, made, megabytes)
        for number in range(ROUNDS // 2):
            _post(server, made, "snapshots", name=f"bench-{number % 2}")
            stopped.append(server.inspect(made)["phases"]["save.stopped"])
        server.api("DELETE", f"/sandboxes/{made}")
        _row(f"snapshot with {megabytes} MB dirty: guest stopped", stopped)
    for number in range(2):
        server.api("DELETE", f"/templates/bench-{number}")


def _disks(server: TestServer) -> None:
    for megabytes in DISKS:
        made = _made(server)
        write = f"head -c {megabytes}M /dev/zero | tr '\\0' x > /srv/written; sync"
        server.cli("exec", made, "--", "sh", "-c", write, check=True, timeout=1200)
        _post(server, made, "snapshots", name="bench-disk")
        sealed = server.inspect(made)["phases"]["save.disk"]
        row(f"sealing a disk with {megabytes} MB written", f"{sealed * 1e3:.1f} ms", "", "")
        server.api("DELETE", f"/sandboxes/{made}")
        server.api("DELETE", "/templates/bench-disk")


def _forks(server: TestServer) -> None:
    made = _made(server)
    for count in (1, 10):
        found: list[float] = []
        for _ in range(5):
            begun = time.perf_counter()
            answer = server.api("POST", f"/sandboxes/{made}/fork", json={"count": count})
            found.append(time.perf_counter() - begun)
            children = [each["sandbox"]["sandboxID"] for each in answer.json()]
            for child in children:
                server.api("DELETE", f"/sandboxes/{child}")
        _row(f"fork of {count}: request to all running", found)
    server.api("DELETE", f"/sandboxes/{made}")


def _cycles(server: TestServer) -> None:
    made = _made(server)
    pauses: list[float] = []
    resumes: list[float] = []
    before = _held(server)
    for _ in range(CYCLES):
        begun = time.perf_counter()
        _post(server, made, "pause")
        paused = time.perf_counter()
        _post(server, made, "connect", timeout=600)
        pauses.append(paused - begun)
        resumes.append(time.perf_counter() - paused)
    tenth = CYCLES // 10
    for name, values in (("pause", pauses), ("resume", resumes)):
        growth = statistics.median(values[-tenth:]) / statistics.median(values[:tenth])
        _row(f"{CYCLES} cycles: {name}", values, f"last tenth / first tenth: {growth:.2f} ×")
    after = _held(server)
    row("– files, layers before and after", f"{before}", "", f"{after}")
    server.api("DELETE", f"/sandboxes/{made}")


def _memory(server: TestServer) -> None:
    """Ten sandboxes of one template, each paused and resumed after work of its own."""
    guests = [_made(server) for _ in range(10)]
    for number, made in enumerate(guests):
        _dirty(server, made, number + 1)
        _post(server, made, "pause")
        _post(server, made, "connect", timeout=600)
    rss = pss = private = 0
    for made in guests:
        pid = server.inspect(made)["objects"]["pid"]
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {words[0]: int(words[1]) for words in map(str.split, lines)}
        rss, pss = rss + sizes["Rss:"], pss + sizes["Pss:"]
        private += sizes["Private_Dirty:"]
    row("ten with different histories: Rss, Pss", f"{rss >> 10}, {pss >> 10} MiB", "",
        f"{pss / rss:.2f} ×; private {private >> 10} MiB")  # fmt: skip
    for made in guests:
        server.api("DELETE", f"/sandboxes/{made}")


def _made(server: TestServer) -> str:
    return server.create(TEMPLATE, timeout=3600)["sandboxID"]


def _post(server: TestServer, sandbox_id: str, verb: str, **body: object) -> None:
    answer = server.api("POST", f"/sandboxes/{sandbox_id}/{verb}", json=body)
    assert answer.status_code < 300, answer.text


def _dirty(server: TestServer, sandbox_id: str, megabytes: int) -> None:
    if megabytes:
        fill = f"head -c {megabytes}M /dev/urandom > /dev/shm/dirty"
        server.cli("exec", sandbox_id, "--", "sh", "-c", fill, check=True)


def _held(server: TestServer) -> tuple[int, int]:
    """Files of the node that are not stored yet, and layers in the store."""
    layers = [path for path in (server.home / "store" / "layer").rglob("*") if path.is_file()]
    return len(list((server.home / "snapshots").iterdir())), len(layers)


def _row(name: str, seconds: Sequence[float], against: str = "") -> None:
    ordered = sorted(seconds)
    worst = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    row(name, f"{statistics.median(ordered) * 1e3:.1f} ms", f"{worst * 1e3:.1f} ms", against)
