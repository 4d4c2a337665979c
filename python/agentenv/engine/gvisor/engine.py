"""The gVisor engine: makes sandboxes with runsc, has them wait or boot, finds them again."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.concurrency import undo_on_failure
from agentenv.engine.contract import (
    Capabilities,
    Features,
    Machine,
    MachineSpec,
    Suspended,
    Traits,
)
from agentenv.engine.gvisor import bundle, checkpoint, probe, upper
from agentenv.engine.gvisor.bundle import PLATFORM, RunFiles
from agentenv.engine.gvisor.control import Keys, fresh_key
from agentenv.engine.gvisor.machine import GvisorMachine
from agentenv.engine.gvisor.roots import RootMounts
from agentenv.engine.process import make_cgroup, process_name, sweep, tail, version_of
from agentenv.errors import InfraError, faults
from agentenv.host.cgroup import Cgroups
from agentenv.host.probe import cpu_model
from agentenv.host.process import Launcher, ProcessSpec, ProcessStatus

MOST_CPUS = 2
NOTES = (
    "set-user-id programs have no effect, but for sudo",
    "want of memory ends the sandbox",
    "changed files are not told (diff)",
)
TRAITS = Traits(
    "gvisor",
    one_root=True,
    layered=False,
    waits=False,
    bounds_cpus=False,
    disk_name="disk.ext4",
    # Sentry and gofer: 69 MB measured idle, 22 of them the programs' own; caches grow with use.
    overhead=256 << 20,
    # A thread of the guest is one of the host's, and the kernel below it has some for each CPU.
    pids=16384,
)


@dataclass(frozen=True, slots=True)
class Files:
    """``roots`` is a folder for mounts, ours alone."""

    runsc: Path
    agent: Path
    sudo: Path
    roots: Path


class GvisorEngine:
    """Implements ``Engine``."""

    def __init__(self, files: Files, launcher: Launcher, cgroups: Cgroups) -> None:
        self._files, self._launcher, self._cgroups = files, launcher, cgroups
        self._roots = RootMounts(files.roots)
        self._version: str | None = None
        self._preparing = asyncio.Lock()

    @property
    def traits(self) -> Traits:
        return TRAITS

    async def prepare(self) -> None:
        """Raises MissingTool, InfraError."""
        async with self._preparing:
            if self._version is None:
                await probe.must_run(self._files.runsc)
                await asyncio.to_thread(self._roots.prepare, self._files.agent, self._files.sudo)
                self._version = await version_of(self._files.runsc)

    async def capabilities(self) -> Capabilities:
        await self.prepare()
        assert self._version is not None
        cpus = min(MOST_CPUS, os.cpu_count() or 1)
        return Capabilities("gvisor", self._version, PLATFORM, cpus, NOTES)

    async def features(self) -> Features:
        await self.prepare()
        assert self._version is not None
        # Its clocks are the host's, and its kernel is its version.
        return Features("gvisor", self._version, PLATFORM, cpu_model(), self._version, 0)

    async def boot(self, spec: MachineSpec) -> Machine:
        return await self._start(spec, ("run", "--detach"))

    async def make_disk(self, path: Path, size_mib: int, uid: int) -> None:
        del uid  # the host mounts it
        await upper.make(path, size_mib)

    async def ready(self, spec: MachineSpec) -> Machine:
        return await self._start(spec, ("create",))

    async def restore(self, waiting: Machine, spec: MachineSpec, saved: Suspended) -> None:
        assert isinstance(waiting, GvisorMachine)
        files = RunFiles(spec.run_dir)
        kept = await asyncio.to_thread(checkpoint.lay_out, files, saved)
        waiting.keys.write([kept.key])
        await checkpoint.restore(self._files.runsc, spec)

    async def _start(self, spec: MachineSpec, words: Sequence[str]) -> Machine:
        assert spec.root is not None
        await self.prepare()
        files = RunFiles(spec.run_dir)
        (image,) = spec.root.segments
        async with undo_on_failure() as undo:
            root = await self._roots.hold(image, spec.sandbox_id)
            await asyncio.to_thread(_write, files, root, spec.memory_mib)
            undo.push("cgroup", lambda: self._cgroups.remove(spec.cgroup))
            procs = await asyncio.to_thread(make_cgroup, self._cgroups, spec)
            more = (f"--bundle={spec.run_dir}", f"--pid-file={files.pid}", spec.sandbox_id)
            argv = bundle.runsc(self._files.runsc, files, *words, *more)
            process = ProcessSpec(
                name=process_name(spec.sandbox_id),
                argv=bundle.start(spec, argv),
                log=files.console,
                env={"PATH": os.defpath + ":/usr/sbin:/sbin"},
                cgroups=procs,
                pid_file=files.pid,
            )
            status = await self._launcher.launch(process)
            if not status.running:
                raise InfraError(
                    "gVisor did not start",
                    why=" / ".join(tail(files.console, 3)) or f"status {status.exit_status}",
                    code="engine_failed",
                )
            return self._machine(spec, status)

    def _machine(self, spec: MachineSpec, status: ProcessStatus) -> GvisorMachine:
        return GvisorMachine(
            spec,
            status,
            self._launcher,
            self._cgroups,
            self._files.runsc,
        )

    async def adopt(self, spec: MachineSpec) -> Machine | None:
        status = await self._launcher.status(process_name(spec.sandbox_id))
        if status is None:
            await self._cgroups.remove(spec.cgroup)
            return None
        return self._machine(spec, status)

    async def sweep(self, keep: set[str]) -> None:
        await sweep(self._launcher, self._cgroups, keep)

    async def forget(self, machine: str) -> None:
        await self._roots.release(machine)

    async def forget_all_but(self, keep: set[str]) -> None:
        await self._roots.keep_only(keep)

    async def leave(self) -> None:
        await self.forget_all_but(set())
        await asyncio.to_thread(self._roots.remove)


def _write(files: RunFiles, root: Path, memory_mib: int) -> None:
    key = fresh_key()
    with faults("the sandbox's bundle could not be written"):
        files.upper.mkdir(mode=0o700, exist_ok=True)
        files.memory.write_text(f"MemTotal: {memory_mib << 10} kB\n")
        files.config.touch(mode=0o600)
        files.config.write_text(json.dumps(bundle.config(root, key)))
    Keys(files.keys).write([key])
