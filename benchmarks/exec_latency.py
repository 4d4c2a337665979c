"""A command in a running sandbox: ours against `docker exec` and `runsc exec`, same command.

What is measured is one `true` from outside: for us by the Connect protocol over HTTP as SDKs do
it, for the others by their own command line, with an empty command line's own cost beside it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server import TestServer

from agentenv.sdk.client import Address, Client
from agentenv.sdk.process import Ended, Processes
from benchmarks.machine import heading, row, sandbox, summary, timed
from benchmarks.peers import busybox, docker_image

ROUNDS = 40


def run(server: TestServer) -> None:
    heading("what", "`true` in a running sandbox", "against ours")
    with sandbox(server) as made:
        ours = asyncio.run(_ours(server, made["sandboxID"]))
        row("AgentENV, HTTP", summary(ours), "1.00")
        base = statistics.median(ours)
        argv = ["exec", made["sandboxID"], "--", "true"]
        cli = timed(lambda: server.cli(*argv, check=True), 10)
        row("AgentENV, `aenv exec`", summary(cli), f"{statistics.median(cli) / base:.2f}")
    for name, open_other in (("runsc", _runsc), ("docker", _docker)):
        if shutil.which(name) is None:
            print(
                f"(no {name} here: not compared; apt-get install {name.replace('docker', 'docker.io')})"
            )
            continue
        with open_other() as argv:
            if not argv:
                print(f"({name} does not run here: not compared)")
                continue
            subprocess.run(argv, check=True)
            other = timed(lambda words=argv: subprocess.run(words, check=True), ROUNDS)
            row(f"`{name} exec`", summary(other), f"{statistics.median(other) / base:.2f}")


async def _ours(server: TestServer, sandbox_id: str) -> list[float]:
    found: list[float] = []
    async with Client(Address(server.url, server.key)) as client:
        processes = Processes(client, await client.sandbox(sandbox_id))
        for _ in range(ROUNDS + 3):
            begun = time.perf_counter()
            async for event in processes.start(("true",), env={}, cwd=None, user=None, stdin=False):
                if isinstance(event, Ended):
                    assert event.exit_code == 0
            found.append(time.perf_counter() - begun)
    return sorted(found[3:])


@contextmanager
def _runsc() -> Iterator[list[str]]:
    """A gVisor sandbox over a busybox root."""
    folder = Path(tempfile.mkdtemp(prefix="aenv-bench-runsc-", dir="/var/tmp"))
    state = ["runsc", "--root", str(folder / "state"), "--network=none", "--ignore-cgroups"]
    try:
        busybox(folder / "rootfs")
        spec = {
            "ociVersion": "1.0.0",
            "process": {"args": ["/bin/busybox", "sleep", "3600"], "cwd": "/", "user": {"uid": 0, "gid": 0},
                        "env": ["PATH=/bin"]},
            "root": {"path": "rootfs"}, "mounts": [{"destination": "/proc", "type": "proc"}],
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(spec))
        # Its sandbox keeps what streams it is given: a pipe would never end.
        begun = subprocess.run(
            [*state, "run", "--detach", "--bundle", str(folder), "bench"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=60,
        )  # fmt: skip
        yield [*state, "exec", "bench", "/bin/true"] if begun.returncode == 0 else []
    finally:
        subprocess.run([*state, "kill", "bench", "KILL"], capture_output=True)
        subprocess.run([*state, "delete", "--force", "bench"], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _docker() -> Iterator[list[str]]:
    """A container of a busybox root, if an engine answers."""
    with docker_image() as image:
        if not image:
            yield []
            return
        started = subprocess.run(
            ["docker", "run", "-d", "--network=none", image, "/bin/sleep", "3600"],
            capture_output=True, text=True,
        )  # fmt: skip
        name = started.stdout.strip()
        try:
            yield ["docker", "exec", name, "/bin/true"] if started.returncode == 0 else []
        finally:
            subprocess.run(["docker", "rm", "-f", name], capture_output=True)
