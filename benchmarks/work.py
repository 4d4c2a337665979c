"""What an agent does, timed where it is done: run by the Python of a sandbox, a container, a chroot.

It knows the standard library alone. The first word names a folder with wheels, the second one on
the disk to work in; the answer is a line of JSON, seconds by name (medians of the rounds).
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STATS = 20_000
SPAWNS = 50
SMALL_FILES = 2_000


def main(wheels: str, folder: str, rounds: int) -> None:
    os.makedirs(folder)
    try:
        found = {name: _median(work, folder, rounds) for name, work in SHORT.items()}
        found["install"] = _timed(install, wheels, folder)
        found["suite"] = _median(suite, folder, rounds)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found))


def cpu(_: str) -> None:
    total = 0
    for number in range(3_000_000):
        total += number * number % 7
    assert total > 0


def stat(_: str) -> None:
    for _number in range(STATS):
        os.stat("/etc/passwd")


def spawn(_: str) -> None:
    for _number in range(SPAWNS):
        _run(["/bin/true"])


def small_files(folder: str) -> None:
    names = [os.path.join(folder, str(number)) for number in range(SMALL_FILES)]
    for name in names:
        with open(name, "wb") as file:
            file.write(b"x" * 1024)
    for name in names:
        with open(name, "rb") as file:
            assert len(file.read()) == 1024
    for name in names:
        os.unlink(name)


def install(wheels: str, folder: str) -> None:
    """Pip comes as a wheel, which Python runs as it is."""
    (pip,) = glob.glob(os.path.join(wheels, "pip-*.whl"))
    words = ["install", "--quiet", "--no-index", "--no-cache-dir", "--root-user-action", "ignore"]
    argv = [sys.executable, f"{pip}/pip", *words, "--find-links", wheels]
    _run([*argv, "--target", f"{folder}/site", "pytest", "toolz"])


def suite(folder: str) -> None:
    """The tests of toolz, which its wheel has in it."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "toolz"]
    _run(argv, env={**os.environ, "PYTHONPATH": f"{folder}/site"}, cwd=folder)


SHORT = {"cpu": cpu, "stat": stat, "spawn": spawn, "small_files": small_files}


def _run(argv: list[str], **options: Any) -> None:
    silent = subprocess.DEVNULL
    subprocess.run(argv, check=True, stdin=silent, stdout=silent, **options)


def _median(work: Callable[..., None], folder: str, rounds: int) -> float:
    return statistics.median(_timed(work, folder) for _ in range(rounds))


def _timed(work: Callable[..., None], *words: str) -> float:
    begun = time.perf_counter()
    work(*words)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
