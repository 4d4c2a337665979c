"""The QEMU engine: probes what accelerates here, boots machines, finds them again."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentenv import _core
from agentenv.concurrency import undo_on_failure
from agentenv.engine.contract import (
    Capabilities,
    Features,
    Machine,
    MachineSpec,
    Suspended,
    Traits,
)
from agentenv.engine.process import make_cgroup, process_name, sweep, version_of
from agentenv.engine.qemu import argv, disk, initrd, probe
from agentenv.engine.qemu.argv import Guest, RunFiles
from agentenv.engine.qemu.machine import QemuMachine
from agentenv.errors import InfraError, faults
from agentenv.host.cgroup import Cgroups
from agentenv.host.probe import cpu_model
from agentenv.host.process import Launcher, ProcessSpec
from agentenv.host.tools import GuestKernel

OpenTap = Callable[[Path, str], int]
TSC_SPAN = 20  # milliseconds of measuring
# QEMU itself: 35 MB measured idle, its translation cache, and room for I/O buffers.
TRAITS = Traits(
    "qemu",
    one_root=False,
    layered=True,
    waits=True,
    bounds_cpus=True,
    disk_name="disk.qcow2",
    overhead=320 << 20,
)


@dataclass(frozen=True, slots=True)
class Files:
    """Where this node's guest parts are; ``work`` is ours to write (initrd, verdicts)."""

    qemu: Path
    kernel: GuestKernel
    agent: Path
    map: Path
    work: Path


class QemuEngine:
    """Implements ``Engine``. ``open_tap(netns, name)`` gives a tap's descriptor."""

    def __init__(
        self, files: Files, launcher: Launcher, cgroups: Cgroups, open_tap: OpenTap
    ) -> None:
        self._files, self._launcher, self._cgroups = files, launcher, cgroups
        self._open_tap = open_tap
        self._guest: Guest | None = None
        self._capabilities: Capabilities | None = None
        self._features: Features | None = None
        self._preparing = asyncio.Lock()

    @property
    def traits(self) -> Traits:
        return TRAITS

    async def capabilities(self) -> Capabilities:
        await self.prepare()
        assert self._capabilities is not None
        return self._capabilities

    async def prepare(self) -> Guest:
        """Probe and build what every boot needs, once. Raises MissingTool, InfraError."""
        async with self._preparing:
            if self._guest is None:
                self._guest, self._capabilities = await self._examine()
                self._features = _features(self._guest, self._capabilities)
            return self._guest

    async def features(self) -> Features:
        await self.prepare()
        assert self._features is not None
        return self._features

    async def _examine(self) -> tuple[Guest, Capabilities]:
        files = self._files
        version = await version_of(files.qemu)
        files.work.mkdir(mode=0o755, parents=True, exist_ok=True)
        make = functools.partial(initrd.ensure, files.work, files.agent, files.kernel.modules)
        built = await asyncio.to_thread(make)
        kernel = files.kernel.image
        verdict = await probe.kvm(files.work, files.qemu, version, lambda: built, kernel)
        accelerator = "kvm" if verdict.works else "tcg"
        tsc = await asyncio.to_thread(_core.tsc_khz, TSC_SPAN)
        guest = Guest(files.qemu, kernel, built, accelerator, tsc)
        notes = (f"KVM: {verdict.reason}",)
        cpus = 2 if verdict.works else 1
        return guest, Capabilities("qemu", version, accelerator, cpus, notes)

    async def boot(self, spec: MachineSpec) -> Machine:
        guest = await self.prepare()
        return await self._start(spec, argv.boot(guest, spec, RunFiles(spec.run_dir)), {})

    async def make_disk(self, path: Path, size_mib: int, uid: int) -> None:
        await disk.make(self._files.work, path, size_mib, uid)

    async def ready(self, spec: MachineSpec) -> Machine:
        guest = await self.prepare()
        files = RunFiles(spec.run_dir)
        await asyncio.to_thread(_make_ram, spec, files)
        preload = {"LD_PRELOAD": str(self._files.map), "AGENTENV_MEMORY": str(files.memory)}
        return await self._start(spec, argv.wait(guest, spec, files), preload)

    async def restore(self, waiting: Machine, spec: MachineSpec, saved: Suspended) -> None:
        assert isinstance(waiting, QemuMachine)
        files = RunFiles(spec.run_dir)
        await asyncio.to_thread(_write_descriptor, spec, files)
        await asyncio.to_thread(_lay_out, spec, files, saved)
        await waiting.load(spec)

    async def _start(
        self, spec: MachineSpec, words: tuple[str, ...], env: dict[str, str]
    ) -> QemuMachine:
        files = RunFiles(spec.run_dir)
        async with undo_on_failure() as undo:
            await asyncio.to_thread(_write_descriptor, spec, files)
            undo.push("cgroup", lambda: self._cgroups.remove(spec.cgroup))
            procs = await asyncio.to_thread(make_cgroup, self._cgroups, spec)
            fds = await self._descriptors(spec, files)
            try:
                process = ProcessSpec(
                    name=process_name(spec.sandbox_id),
                    argv=words,
                    log=files.log,
                    env={"PATH": "/usr/bin:/bin", **env},
                    cwd=str(spec.run_dir),
                    uid=spec.uid,
                    gid=spec.gid,
                    cgroups=procs,
                )
                status = await self._launcher.launch(process, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            return QemuMachine(spec, status, self._launcher, self._cgroups)

    async def adopt(self, spec: MachineSpec) -> Machine | None:
        status = await self._launcher.status(process_name(spec.sandbox_id))
        if status is None:
            await self._cgroups.remove(spec.cgroup)
            return None
        return QemuMachine(spec, status, self._launcher, self._cgroups)

    async def sweep(self, keep: set[str]) -> None:
        await sweep(self._launcher, self._cgroups, keep)

    async def forget(self, machine: str) -> None:
        """The engine's process held its root, and is gone."""

    async def forget_all_but(self, keep: set[str]) -> None:
        """As ``forget``."""

    async def leave(self) -> None:
        """It has nothing there."""

    async def _descriptors(self, spec: MachineSpec, files: RunFiles) -> list[int]:
        """Those that `argv` counts on, the caller's to close."""
        fds = [_listening(files.qmp), _listening(files.control)]
        if network := spec.network:
            try:
                fds.append(await asyncio.to_thread(self._open_tap, network.netns, network.tap))
            except BaseException as error:
                for fd in fds:
                    os.close(fd)
                if not isinstance(error, OSError):
                    raise
                raise InfraError(
                    f"tap {network.tap} cannot be opened", why=str(error), code="network_failed"
                ) from error
        return fds


def _write_descriptor(spec: MachineSpec, files: RunFiles) -> None:
    if spec.root and len(spec.root.segments) > 1:
        sized = tuple((path, path.stat().st_size) for path in spec.root.segments)
        files.root.write_text(argv.vmdk(sized))
        files.root.chmod(0o444)


def _listening(path: Path) -> int:
    with faults("the machine's sockets could not be made"), socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen()
        return made.detach()


def _make_ram(spec: MachineSpec, files: RunFiles) -> None:
    """What `agentenv-map` knows a machine's memory by."""
    with faults("the machine's memory file could not be made"):
        files.memory.mkdir(mode=0o700)
        ram = files.memory / "ram"
        ram.touch()
        os.truncate(ram, spec.memory_mib << 20)
        for path in (files.memory, ram):
            os.chown(path, spec.uid, spec.gid)


def _lay_out(spec: MachineSpec, files: RunFiles, saved: Suspended) -> None:
    """What a restored machine finds in its run folder."""
    with faults("the saved machine could not be laid out"):
        (files.memory / "map").write_bytes(saved.memory_map)
        files.devices.write_bytes(saved.state)
        for path in (files.memory / "map", files.devices):
            os.chown(path, spec.uid, spec.gid)


def _features(guest: Guest, capabilities: Capabilities) -> Features:
    return Features(
        engine=capabilities.engine,
        version=capabilities.version,
        accelerator=guest.accelerator,
        cpu=cpu_model() if guest.accelerator == "kvm" else argv.EMULATED_CPU,
        kernel=guest.kernel.name,
        tsc_khz=guest.tsc_khz,
    )
