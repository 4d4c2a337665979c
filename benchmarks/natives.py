"""The machine itself and docker, over the packages that the sandboxes' image has."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.server import BASE_IMAGE

from benchmarks.machine import parent_of, pss_of, timed
from benchmarks.peers import docker_image

WORK = Path(__file__).with_name("work.py")
WORK_ROUNDS = 3
Figures = dict[str, float]


@contextmanager
def materials(parent: Path) -> Iterator[Path]:
    """A folder of `work.py` and the wheels that it installs, fetched from the package index."""
    folder = Path(tempfile.mkdtemp(prefix="work-", dir=parent))
    try:
        shutil.copy(WORK, folder)
        words = ["--quiet", "--only-binary", ":all:", "--python-version", "3.11", "--dest", folder]
        _run(sys.executable, "-m", "pip", "download", *words, "pip", "pytest", "toolz")
        yield folder
    finally:
        shutil.rmtree(folder)


def work(materials: str) -> tuple[str, ...]:
    return ("/usr/bin/python3", f"{materials}/work.py", materials, "/srv/bench", str(WORK_ROUNDS))


@contextmanager
def root(parent: Path) -> Iterator[Path]:
    """The image's packages as a tar and, beside it, unpacked."""
    folder = Path(tempfile.mkdtemp(prefix="root-", dir=parent))
    try:
        suite, _, packages = BASE_IMAGE.partition(":")[2].partition("+")
        tar = folder / "root.tar"
        _run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", suite, tar)
        (folder / "tree").mkdir()
        _run("tar", "-C", folder / "tree", "-xpf", tar)
        yield folder
    finally:
        shutil.rmtree(folder)


def native(root: Path, materials: Path, rounds: int) -> Figures:
    """This machine's kernel and disk; a process is begun as a script would, in a root of its own."""
    shutil.copytree(materials, root / "tree/work")
    apart = (
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        f"--mount-proc={root}/tree/proc",
    )
    inside = (*apart, "chroot", root / "tree")
    starts = timed(lambda: _run(*inside, "/bin/echo", "up"), rounds)
    return {"first": statistics.median(starts), **json.loads(_run(*inside, *work("/work")))}


def docker(root: Path, materials: Path, rounds: int, forks: int, crowd: int) -> Figures:
    """By its command line, as it is used; nothing if no engine answers."""
    with docker_image(root / "root.tar") as image:
        if not image:
            print("(no docker here: not compared; apt-get install docker.io, and start dockerd)")
            return {}
        idle = ("docker", "run", "-d", "--network=none", image, "/bin/sleep", "3600")
        first = ("docker", "run", "--rm", "--network=none", image, "/bin/echo", "up")
        found = {"first": timed(lambda: _run(*first), rounds)}
        with _containers(idle, 1) as (name,):
            found["exec"] = timed(lambda: _run("docker", "exec", name, "/bin/true"), rounds)
            for _ in range(rounds):
                for key, verb in (("pause.50", "pause"), ("resume.50", "unpause")):
                    found.setdefault(key, []).extend(
                        timed(lambda v=verb: _run("docker", v, name), 1)
                    )
            figures = {"memory.1": _memory([name])}
            _run("docker", "cp", materials, f"{name}:/work")
            figures |= json.loads(_run("docker", "exec", name, *work("/work")))
        for _ in range(3):
            names: list[str] = []
            found.setdefault("fork", []).extend(
                timed(lambda n=names: n.extend(_at_once(idle, forks)), 1)
            )
            _run("docker", "rm", "-f", *names)
        with _containers(idle, crowd) as names:
            figures["memory.crowd"] = _memory(names)
    return figures | {key: statistics.median(times) for key, times in found.items()}


@contextmanager
def _containers(idle: Sequence[str], count: int) -> Iterator[list[str]]:
    names = _at_once(idle, count)
    try:
        yield names
    finally:
        _run("docker", "rm", "-f", *names)


def _at_once(argv: Sequence[str], count: int) -> list[str]:
    with ThreadPoolExecutor(count) as pool:
        return [said.strip() for said in pool.map(lambda _: _run(*argv), range(count))]


def _memory(names: Sequence[str]) -> float:
    """MiB of each: its process and the shim that holds it."""
    mains = _run("docker", "inspect", "--format", "{{.State.Pid}}", *names).split()
    pids = [int(pid) for pid in mains]
    return pss_of([*pids, *map(parent_of, pids)]) / len(names)


def _run(*argv: str | Path) -> str:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
