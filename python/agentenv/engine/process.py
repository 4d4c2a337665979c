"""What machines of all engines have alike: a process in a cgroup, followed to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from abc import ABC, abstractmethod
from pathlib import Path

from agentenv.concurrency import Tasks
from agentenv.engine.cause import decide
from agentenv.engine.contract import ControlChannel, ExitCause, MachineSpec
from agentenv.errors import GuestError, InfraError, NotFound
from agentenv.host.cgroup import Cgroups, GroupLimits
from agentenv.host.process import Launcher, ProcessStatus, run

log = logging.getLogger(__name__)

CONSOLE_MAX = 4 << 20  # bytes; above this the older part is cut off
CONSOLE_KEPT = 256 << 10
LINES_JUDGED = 400  # of the console: a panic's own words can stand far above its end
TRIM_INTERVAL = 30.0  # seconds between looks at the console's size
TAIL_READ = 64 << 10

PROCESS_PREFIX = "engine/"


def process_name(sandbox_id: str) -> str:
    return PROCESS_PREFIX + sandbox_id


def make_cgroup(cgroups: Cgroups, spec: MachineSpec) -> tuple[Path, ...]:
    """The machine's cgroup; the files by which a process enters it."""
    limits = spec.limits
    wanted = GroupLimits(limits.memory_bytes, limits.pids, limits.cpu_weight, limits.cpu_quota)
    return cgroups.create(spec.cgroup, wanted)


async def version_of(program: Path) -> str:
    """What ``--version`` says behind the word. Raises MissingTool, InfraError."""
    done = await run((str(program), "--version"), timeout=20)
    return done.stdout.decode().split("version ", 1)[-1].split()[0]


async def sweep(launcher: Launcher, cgroups: Cgroups, keep: set[str]) -> None:
    """See ``Engine.sweep``: processes and cgroups."""
    for status in await launcher.all():
        sandbox_id = status.name.removeprefix(PROCESS_PREFIX)
        if sandbox_id == status.name or sandbox_id in keep:
            continue
        await launcher.signal(status.name, signal.SIGKILL)
        await launcher.wait(status.name)
        await launcher.forget(status.name)
    for name in cgroups.names() - keep:
        await cgroups.remove(name)


class ProcessMachine(ABC):
    """The part of ``Machine`` that needs no word with the engine. ``title`` is the engine's name
    for people; its messages are in ``log_file``, the guest's in ``console``."""

    def __init__(
        self,
        spec: MachineSpec,
        status: ProcessStatus,
        launcher: Launcher,
        cgroups: Cgroups,
        *,
        title: str,
        console: Path,
        log_file: Path,
    ) -> None:
        self._spec, self._status = spec, status
        self._launcher, self._cgroups = launcher, cgroups
        self._title, self._console, self._log_file = title, console, log_file
        self._asked = False
        self._tasks = Tasks()
        self._end = self._tasks.start(self._follow(), f"follow {spec.sandbox_id}")

    @property
    def pid(self) -> int:
        return self._status.pid

    @property
    def ended(self) -> bool:
        return self._end.done()

    @abstractmethod
    async def control(self) -> ControlChannel: ...

    async def stop(self, grace: float) -> ExitCause:
        self._asked = True
        with contextlib.suppress(GuestError, InfraError, TimeoutError):
            async with asyncio.timeout(grace):
                await (await self.control()).call("shutdown", timeout=grace)
                await self.wait()
        return await self.kill()

    async def kill(self) -> ExitCause:
        name = process_name(self._spec.sandbox_id)
        status = await self._launcher.status(name)
        if status is not None and status.running:
            self._asked = True
            await self._launcher.signal(name, signal.SIGKILL)
        return await self.wait()

    async def wait(self) -> ExitCause:
        return await asyncio.shield(self._end)

    def console_tail(self, lines: int = 40) -> tuple[str, ...]:
        return tail(self._console, lines)

    async def _follow(self) -> ExitCause:
        """Watch to the end, keep the console bounded, then say why."""
        name = process_name(self._spec.sandbox_id)
        ended = self._tasks.start(self._wait_process(name), f"wait {name}")
        while not (await asyncio.wait((ended,), timeout=TRIM_INTERVAL))[0]:
            await asyncio.to_thread(trim, self._console)
        status = ended.result()
        cause = decide(
            engine=self._title,
            status=status.exit_status if status else None,
            asked=self._asked,
            oom_kills=self._cgroups.oom_kills(self._spec.cgroup),
            console=self.console_tail(LINES_JUDGED),
            engine_log=tail(self._log_file, 5),
        )
        await self._cgroups.remove(self._spec.cgroup)
        await self._launcher.forget(name)
        return cause

    async def _wait_process(self, name: str) -> ProcessStatus | None:
        """Wait through restarts of the supervisor; None if nobody knows the process any more."""
        while True:
            try:
                return await self._launcher.wait(name)
            except NotFound:
                return None
            except InfraError:
                log.warning("the supervisor does not answer; waiting for it")
                await self._launcher.ensure()


def tail(path: Path, lines: int) -> tuple[str, ...]:
    """The last lines of a text file; () if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_READ - lines * 200))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-lines:]


def trim(path: Path) -> None:
    """Cut a grown console down to its end. QEMU appends, so it goes on writing behind the cut.

    What it writes between our read and the cut is lost; at this size that is a flood anyway.
    """
    with contextlib.suppress(OSError), path.open("rb+") as file:
        if os.fstat(file.fileno()).st_size > CONSOLE_MAX:
            file.seek(-CONSOLE_KEPT, os.SEEK_END)
            kept = file.read()
            file.seek(0)
            file.truncate()
            file.write(kept)
