"""Sandboxes asked for at once: success rate, time until all answer, against one alone."""

from __future__ import annotations

import concurrent.futures
import time

from tests.server import TestServer

from benchmarks.machine import heading, row

COUNTS = (1, 10, 30)


def run(server: TestServer) -> None:
    heading("at once", "succeeded", "first answer", "last answer", "per sandbox, against one alone")
    alone = 0.0
    for count in COUNTS:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            begun = time.perf_counter()
            outcomes = list(pool.map(_life, [server] * count, [begun] * count))
        good = sorted(seconds for seconds in outcomes if seconds is not None)
        alone = alone or good[-1]
        row(count, f"{len(good)} of {count}", f"{good[0]:.1f} s", f"{good[-1]:.1f} s",
            f"{good[-1] / count / alone:.2f}")  # fmt: skip
        server.cli("kill", "--all", check=True, timeout=600)


def _life(server: TestServer, begun: float) -> float | None:
    """Seconds from the common start to a command's answer; None if either failed."""
    answer = server.api(
        "POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 900, "memoryMB": 384}
    )
    if answer.status_code != 201:
        print(f"  failed: {answer.text[:200]}")
        return None
    done = server.cli("exec", answer.json()["sandboxID"], "--", "echo", "up", timeout=600)
    return time.perf_counter() - begun if done.stdout == b"up\n" else None
