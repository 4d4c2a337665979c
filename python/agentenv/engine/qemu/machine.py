"""One QEMU process: reached by its control socket, watched to its end, its traces removed after."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Any, cast

from agentenv.concurrency import Tasks
from agentenv.engine.contract import ControlChannel, ExitCause, MachineSpec, Saved, SavePlan
from agentenv.engine.qemu import qmp, suspend
from agentenv.engine.qemu.argv import RunFiles
from agentenv.engine.qemu.cause import decide
from agentenv.engine.qemu.control import SerialControl
from agentenv.errors import GuestError, InfraError, NotFound
from agentenv.host.cgroup import Cgroups
from agentenv.host.process import Launcher, ProcessStatus

log = logging.getLogger(__name__)

CONSOLE_MAX = 4 << 20  # bytes; above this the older part is cut off
CONSOLE_KEPT = 256 << 10
LINES_JUDGED = 400  # of the console: a panic's own words can stand far above its end
TRIM_INTERVAL = 30.0  # seconds between looks at the console's size
TAIL_READ = 64 << 10
END_AFTER_CUT = 1.0  # seconds


PROCESS_PREFIX = "engine/"


def process_name(sandbox_id: str) -> str:
    return PROCESS_PREFIX + sandbox_id


class QemuMachine:
    """Implements ``Machine``."""

    def __init__(
        self, spec: MachineSpec, status: ProcessStatus, launcher: Launcher, cgroups: Cgroups
    ) -> None:
        self._spec, self._status = spec, status
        self._launcher, self._cgroups = launcher, cgroups
        self._files = RunFiles(spec.run_dir)
        self._asked = False
        self._control: SerialControl | None = None
        self._tasks = Tasks()
        self._end = self._tasks.start(self._follow(), f"follow {spec.sandbox_id}")

    @property
    def pid(self) -> int:
        return self._status.pid

    async def control(self) -> ControlChannel:
        """The one channel: QEMU serves one connection at a time, so all callers share it.

        Raises InfraError if the machine is gone.
        """
        if self._control is None or self._control.closed:
            self._control = await SerialControl.open(self._files.control)
        return self._control

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

    async def proceed(self) -> bool:
        async with qmp.connected(self._files.qmp) as monitor:
            answer = await monitor.execute("query-status")
            stopped = cast("dict[str, Any]", answer)["status"] == "io-error"
            if stopped:
                await monitor.execute("cont")
            return stopped

    async def save(self, plan: SavePlan) -> Saved:
        return await suspend.save(self._files, self.pid, plan)

    async def writes(self, disk: Path) -> bool:
        return await suspend.writes(self._files, disk)

    async def go_on(self) -> None:
        async with qmp.connected(self._files.qmp) as monitor:
            await monitor.execute("cont")

    @property
    def ended(self) -> bool:
        return self._end.done()

    async def load(self, spec: MachineSpec) -> None:
        """Take the saved state that lies in the run folder, and run. Raises InfraError."""
        try:
            await suspend.load(self._files, spec)
        except InfraError:
            # A machine that ends cuts its monitor first; its cause is known a moment later.
            await asyncio.wait((self._end,), timeout=END_AFTER_CUT)
            if self._end.done():
                raise InfraError(
                    "the saved machine did not start",
                    why=self._end.result().reason,
                    code="restore_failed",
                ) from None
            raise

    def console_tail(self, lines: int = 40) -> tuple[str, ...]:
        return tail(self._files.console, lines)

    def objects(self) -> dict[str, Any]:
        name = self._spec.cgroup
        return {
            "pid": self.pid,
            "engine": "qemu",
            "control_socket": str(self._files.control),
            "qmp_socket": str(self._files.qmp),
            "console": str(self._files.console),
            "cgroup": name,
            "memory_bytes": self._cgroups.memory_bytes(name),
        }

    async def _follow(self) -> ExitCause:
        """Watch to the end, keep the console bounded, then say why and clear the host's objects."""
        name = process_name(self._spec.sandbox_id)
        ended = self._tasks.start(self._wait_process(name), f"wait {name}")
        while not (await asyncio.wait((ended,), timeout=TRIM_INTERVAL))[0]:
            await asyncio.to_thread(trim, self._files.console)
        status = ended.result()
        cause = decide(
            status=status.exit_status if status else None,
            asked=self._asked,
            oom_kills=self._cgroups.oom_kills(self._spec.cgroup),
            console=self.console_tail(LINES_JUDGED),
            engine_log=tail(self._files.log, 5),
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
