"""What the benchmarks run on: a server of their own with the image `base`, and tables."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.server import TestServer, serving_copy, with_base


def conditions() -> str:
    """The machine, in one line."""
    model = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), "unknown",
    )  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} CPUs ({model}), {memory:.0f} GiB, Linux {platform.release()}, "
        f"load {load:.1f} at the start, {time.strftime('%Y-%m-%d %H:%M')}"
    )


@contextmanager
def node() -> Iterator[TestServer]:
    """A server with the image `base`, in a folder that is gone afterwards; AENV_ENGINE names its
    engine, QEMU else."""
    engine = os.environ.get("AENV_ENGINE", "qemu")
    parent = Path(tempfile.mkdtemp(prefix="aenv-bench-", dir="/var/tmp"))
    parent.chmod(0o711)
    try:
        with (
            with_base(parent) as base,
            serving_copy(parent, base, AENV_ENGINE=engine) as server,
        ):
            yield server
    finally:
        shutil.rmtree(parent)


@contextmanager
def sandbox(server: TestServer, **fields) -> Iterator[dict]:
    made = server.create("base", timeout=1800, **fields)
    try:
        yield made
    finally:
        server.cli("kill", made["sandboxID"], check=True)


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of so many runs, in order, sorted."""
    found: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return sorted(found)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def pss_of(pids: Iterable[int]) -> float:
    """MiB that these processes hold together, shared pages by their share; gone ones hold none."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def summary(seconds: Sequence[float]) -> str:
    """Median and 90th percentile in milliseconds."""
    ninetieth = seconds[min(len(seconds) - 1, int(len(seconds) * 0.9))]
    return f"{statistics.median(seconds) * 1e3:.1f} ms (p90 {ninetieth * 1e3:.1f})"


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def heading(*names: str) -> None:
    row(*names)
    row(*("---" for _ in names))
