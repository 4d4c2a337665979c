"""Both engines beside docker and the machine itself, in one run: what an agent waits for, what its
work takes, what an idle sandbox holds. Each has the same packages in its root.

Docker goes by its command line, as its users have it. What it pauses it does not save, and its
"fork" are new containers: nothing of it can be copied while it runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.server import TestServer, serving_copy
from tests.waiting import until

from agentenv.errors import AgentEnvError
from agentenv.sdk.sync import AgentEnv
from benchmarks.machine import heading, parent_of, pss_of, row
from benchmarks.natives import Figures, docker, materials, native, root, work

TEMPLATE = "bench-engines"
ROUNDS = 10
FORKS = 10
CROWD = 50
# Figure, what it is, and what gVisor is to reach (issue 6): milliseconds, MiB.
WAITS = (
    ("first", "create from a template to a first command's output", 250),
    ("exec", "a command in a running one", 25),
    ("pause.0", "pause, request to answer", None),
    ("pause.50", "pause, 50 MB changed", 200),
    ("resume.8", "resume, 8 MB changed, request to answer", 250),
    ("resume.50", "resume, 50 MB changed", 400),
    ("fork", f"fork of {FORKS}, request to all running", None),
)  # fmt: skip
MEMORY = (
    ("memory.1", "memory of an idle one alone", None),
    ("memory.crowd", f"of each of {CROWD}", 20),
)
STORED = (
    ("stored.first", "stored by a first snapshot, 50 MB changed", None),
    ("stored.second", "stored by a second one, 1 MB changed since", None),
    ("stored.same", "stored by a third one, nothing changed", None),
)
# What `work.py` does, and how many times a native run's time gVisor may take.
WORK = (
    ("cpu", "3 million rounds of a Python loop", None),
    ("stat", "20,000 stat", None),
    ("spawn", "50 programs, one after the other", None),
    ("small_files", "2,000 files of 1 KiB: written, read, removed", None),
    ("install", "pip installs pytest and toolz from wheels on the disk", None),
    ("suite", "the tests of toolz (193)", 1.5),
)


def run(server: TestServer) -> None:
    parent = server.home.parent
    with materials(parent) as folder:
        found = {name: _engine(server, name, folder) for name in ("gvisor", "qemu")}
        with root(parent) as unpacked:
            found["docker"] = docker(unpacked, folder, ROUNDS, FORKS, CROWD)
            found["native"] = native(unpacked, folder, ROUNDS)
    heading("what", "gVisor", "to reach", "QEMU, emulated", "docker", "native")
    for key, name, target in WAITS:
        _compare(found, key, name, "ms", 1e3, target)
    for key, name, target in MEMORY:
        _compare(found, key, name, "MiB", 1, target)
    for key, name, target in STORED:
        _compare(found, key, name, "MB", 1e-6, target)
    for key, name, target in WORK:
        base = found["native"][key]
        times = {
            who: {key: figures[key] / base} for who, figures in found.items() if key in figures
        }
        _compare(times, key, f"{name}; native {base * 1e3:.0f} ms", "×", 1, target)


def _engine(of: TestServer, engine: str, materials: Path) -> Figures:
    found: dict[str, list[float]] = defaultdict(list)
    with (
        serving_copy(of.home.parent, of, AENV_ENGINE=engine) as server,
        AgentEnv(server.url, server.key) as env,
    ):
        with env.start("base", timeout=1800) as first:
            first.commands.run("true")
            first.snapshot(TEMPLATE)
        for _ in range(ROUNDS):
            _first(env, found)
        with env.start(TEMPLATE, timeout=3600) as sandbox:
            _commands(sandbox, found)
            found["memory.1"].append(_memory(server, [sandbox]))
            _forks(sandbox, found)
            _snapshots(server, sandbox, found)
        for megabytes in (0, 8, 50):
            _pauses(env, megabytes, found)
        with env.start("base", timeout=3600, memoryMB=1024) as sandbox:
            sandbox.files.upload(materials, "/srv")
            said = sandbox.commands.run(work(f"/srv/{materials.name}"), timeout=3000).text
        crowd = [env.start(TEMPLATE, timeout=3600) for _ in range(CROWD)]
        found["memory.crowd"].append(_memory(server, crowd))
        for sandbox in crowd:
            sandbox.kill()
    figures = {name: statistics.median(values) for name, values in found.items()}
    print(engine, figures := figures | json.loads(said))
    return figures


def _first(env: Any, found: dict[str, list[float]]) -> None:
    begun = time.perf_counter()
    with env.start(TEMPLATE, timeout=600) as sandbox:
        assert sandbox.commands.run("echo up").text == "up\n"
        found["first"].append(time.perf_counter() - begun)


def _commands(sandbox: Any, found: dict[str, list[float]]) -> None:
    for _ in range(3 * ROUNDS):
        begun = time.perf_counter()
        sandbox.commands.run(("true",))
        found["exec"].append(time.perf_counter() - begun)


def _forks(sandbox: Any, found: dict[str, list[float]]) -> None:
    for _ in range(3):
        begun = time.perf_counter()
        copies = sandbox.fork(FORKS, timeout=600)
        found["fork"].append(time.perf_counter() - begun)
        for copy in copies:
            if isinstance(copy, AgentEnvError):
                raise copy
            copy.kill()


def _snapshots(server: TestServer, sandbox: Any, found: dict[str, list[float]]) -> None:
    """Bytes that the store has more."""
    store, waiting = server.home / "store", server.home / "snapshots"

    def stored() -> int:
        until(lambda: not any(waiting.glob("*.memory")))
        return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())

    for key, megabytes in (("first", 50), ("second", 1), ("same", 0)):
        if megabytes:
            sandbox.commands.run(f"head -c {megabytes}M /dev/urandom > /dev/shm/{key}")
        before = stored()
        sandbox.snapshot()
        found[f"stored.{key}"].append(stored() - before)


def _pauses(env: Any, megabytes: int, found: dict[str, list[float]]) -> None:
    for _ in range(ROUNDS):
        with env.start(TEMPLATE, timeout=600) as sandbox:
            if megabytes:
                sandbox.commands.run(f"head -c {megabytes}M /dev/urandom > /dev/shm/changed")
            begun = time.perf_counter()
            sandbox.pause()
            paused = time.perf_counter()
            sandbox.resume(600)
            found[f"pause.{megabytes}"].append(paused - begun)
            found[f"resume.{megabytes}"].append(time.perf_counter() - paused)


def _memory(server: TestServer, sandboxes: Sequence[Any]) -> float:
    """MiB of each: all in its cgroup, and the supervisor."""
    objects = [server.inspect(sandbox.id)["objects"] for sandbox in sandboxes]
    names = {each["cgroup"] for each in objects}
    supervisors = {parent_of(each["pid"]) for each in objects}
    within = {pid for pid, name in _cgroups() if name in names}
    return pss_of(within | supervisors) / len(sandboxes)


def _cgroups() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "cgroup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield from ((int(folder.name), Path(line.rpartition(":")[2]).name) for line in lines)


def _compare(
    found: dict[str, Figures], key: str, name: str, unit: str, scale: float, target: float | None
) -> None:
    cells = {
        who: f"{figures[key] * scale:.{0 if unit in ('ms', 'MiB') else 1}f} {unit}"
        for who, figures in found.items()
        if key in figures
    }
    reach = f"≤ {target:g} {unit}" if target else ""
    row(
        name,
        cells.get("gvisor", ""),
        reach,
        *(cells.get(who, "–") for who in ("qemu", "docker", "native")),
    )
