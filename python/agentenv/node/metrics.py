"""Takes samples of running sandboxes, keeps an hour of them on disk, also over a restart.

CPU time is read from the engine's process on the host. A guest is asked for its memory and disk
only if it was busy since the last sample: asking would wake one that sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentenv.concurrency import Tasks
from agentenv.errors import AgentEnvError, faults
from agentenv.host.process import cpu_seconds
from agentenv.sandbox import metrics
from agentenv.sandbox.logs import boot_seconds
from agentenv.sandbox.metrics import INTERVAL, Sample
from agentenv.sandbox.sandbox import Sandbox
from agentenv.sandbox.state import State

log = logging.getLogger(__name__)

# Of one core; an idle emulated guest uses 0.5 %.
IDLE = 0.02
LOOK = 1.0  # seconds between looks for sandboxes that are due
GUEST_DEADLINE = 5.0  # seconds
AT_ONCE = 16  # guests asked at the same time


class MetricsStore:
    """One ring file a sandbox below ``folder``, which only we can write to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, known: set[str]) -> None:
        """Remove the rings of sandboxes that no record knows."""
        with faults("the folder of metrics could not be made"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                if path.name not in known:
                    path.unlink()

    def forget(self, sandbox_id: str) -> None:
        (self._folder / sandbox_id).unlink(missing_ok=True)

    async def add(self, sandbox_id: str, sample: Sample) -> None:
        """Raises InfraError."""
        await asyncio.to_thread(self._write, sandbox_id, sample)

    def _write(self, sandbox_id: str, sample: Sample) -> None:
        with faults("a sample could not be written"):
            fd = os.open(self._folder / sandbox_id, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, metrics.encode(sample), metrics.place(sample))
            finally:
                os.close(fd)

    async def between(self, sandbox_id: str, start: float, end: float) -> Sequence[Sample]:
        """The samples in ``start <= time <= end``, oldest first; none is no fault."""
        try:
            ring = await asyncio.to_thread((self._folder / sandbox_id).read_bytes)
        except FileNotFoundError:
            return ()
        found = [s for s in metrics.decode(ring) if start <= s.time <= end]
        return sorted(found, key=lambda sample: sample.time)


class Sampler:
    """Samples every sandbox at its start and every ``INTERVAL`` seconds from then on."""

    def __init__(self, store: MetricsStore, live: Callable[[], Sequence[Sandbox]]) -> None:
        self._store, self._live = store, live
        self._room = asyncio.Semaphore(AT_ONCE)
        # By sandbox: when it was sampled, its CPU seconds then, and the sample.
        self._last: dict[str, tuple[float, float, Sample | None]] = {}

    async def run(self) -> None:
        tasks = Tasks()
        try:
            while True:
                self._begin_due(tasks)
                await asyncio.sleep(LOOK)
        finally:
            await tasks.close()

    def _begin_due(self, tasks: Tasks) -> None:
        running = {s.info.machine: s for s in self._live() if s.info.state is State.RUNNING}
        for gone in self._last.keys() - running.keys():
            del self._last[gone]
        now = time.time()
        for machine, sandbox in running.items():
            taken = self._last.get(machine)
            # By the clock's intervals, so that no two samples share a slot of the ring.
            if taken is None or now // INTERVAL > taken[0] // INTERVAL:
                begun = sandbox.info.started_at.timestamp() - boot_seconds(sandbox.info)
                earlier = taken or (begun, 0.0, None)
                self._last[machine] = (now, earlier[1], earlier[2])
                tasks.start(self._sample(sandbox, now, earlier), f"sample {sandbox.id}")

    async def _sample(
        self, sandbox: Sandbox, now: float, earlier: tuple[float, float, Sample | None]
    ) -> None:
        """A sandbox that ends or does not answer meanwhile is passed over."""
        then, used, last = earlier
        machine = sandbox.info.machine
        cpu = cpu_seconds(sandbox.pid) if sandbox.pid else None
        if cpu is None:
            return
        cpus = sandbox.info.resources.vcpus
        percent = metrics.cpu_percent(cpu - used, now - then, cpus)
        try:
            async with self._room:
                if last is None or cpu - used > IDLE * (now - then):
                    guest = await sandbox.stats(GUEST_DEADLINE)
                    sample = _from_guest(now, percent, cpus, guest)
                else:
                    # A guest that slept uses what it used.
                    sample = replace(last, time=now, cpu_percent=percent)
            await self._store.add(sandbox.id, sample)
        except AgentEnvError as error:
            log.debug("no sample of %s: %s", sandbox.id, error.message)
            return
        self._last[machine] = (now, cpu, sample)


def _from_guest(now: float, percent: float, cpus: int, guest: dict[str, float]) -> Sample:
    names = ("mem_used", "mem_total", "mem_cache", "disk_used", "disk_total")
    return Sample(now, percent, cpus, *(int(guest[name]) for name in names))
