"""One gVisor sandbox: reached by the agent's port, saved by runsc, watched to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentenv.engine.contract import ControlChannel, MachineSpec, Saved, SavePlan
from agentenv.engine.gvisor import checkpoint
from agentenv.engine.gvisor.bundle import RunFiles
from agentenv.engine.gvisor.control import Keys, TcpControl
from agentenv.engine.process import ProcessMachine
from agentenv.errors import InfraError
from agentenv.host.cgroup import Cgroups
from agentenv.host.process import Launcher, ProcessStatus


class GvisorMachine(ProcessMachine):
    """Implements ``Machine``."""

    def __init__(
        self,
        spec: MachineSpec,
        status: ProcessStatus,
        launcher: Launcher,
        cgroups: Cgroups,
        program: Path,
    ) -> None:
        self._files, self._program = RunFiles(spec.run_dir), program
        self.keys = Keys(self._files.keys)
        self._control: TcpControl | None = None
        super().__init__(
            spec,
            status,
            launcher,
            cgroups,
            title="gVisor",
            console=self._files.console,
            log_file=self._files.log,
        )

    async def control(self) -> ControlChannel:
        if self._control is None:
            network = self._spec.network
            if network is None:
                raise InfraError("a gVisor sandbox without a network cannot be reached")
            self._control = TcpControl(network, self.keys, self.wait)
        return self._control

    async def proceed(self) -> bool:
        """Never stopped by its storage: its reads wait."""
        return False

    async def save(self, plan: SavePlan) -> Saved:
        key = self.keys.read()[0]
        return await checkpoint.save(self._program, self._spec, plan, key)

    async def writes(self, disk: Path) -> bool:
        raise InfraError(f"a gVisor sandbox is given no disk such as {disk.name}")

    async def go_on(self) -> None:
        """It runs: it is saved without being stopped, and has none of its processes go on."""

    def objects(self) -> dict[str, Any]:
        name = self._spec.cgroup
        return {
            "pid": self.pid,
            "engine": "gvisor",
            "state": str(self._files.state),
            "console": str(self._files.console),
            "cgroup": name,
            "memory_bytes": self._cgroups.memory_bytes(name),
        }
