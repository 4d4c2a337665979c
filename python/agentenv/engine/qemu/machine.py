"""One QEMU process: reached by its control socket, watched to its end, its traces removed after."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from agentenv.engine.contract import ControlChannel, MachineSpec, Saved, SavePlan
from agentenv.engine.control import LineControl
from agentenv.engine.process import ProcessMachine
from agentenv.engine.qemu import qmp, suspend
from agentenv.engine.qemu.argv import RunFiles
from agentenv.errors import InfraError
from agentenv.host.cgroup import Cgroups
from agentenv.host.process import Launcher, ProcessStatus

END_AFTER_CUT = 1.0  # seconds


class QemuMachine(ProcessMachine):
    """Implements ``Machine``."""

    def __init__(
        self, spec: MachineSpec, status: ProcessStatus, launcher: Launcher, cgroups: Cgroups
    ) -> None:
        self._files = RunFiles(spec.run_dir)
        self._control: LineControl | None = None
        super().__init__(
            spec,
            status,
            launcher,
            cgroups,
            title="QEMU",
            console=self._files.console,
            log_file=self._files.log,
        )

    async def control(self) -> ControlChannel:
        """The one channel: QEMU serves one connection at a time, so all callers share it.

        Raises InfraError if the machine is gone.
        """
        if self._control is None or self._control.closed:
            self._control = await LineControl.open(self._files.control)
        return self._control

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
