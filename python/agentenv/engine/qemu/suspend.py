"""A QEMU machine saved and brought back: devices by QEMU, memory and disk by us.

``xen-save-devices-state`` writes the devices without the memory (16-26 KB in 2-5 ms), and a machine
started with ``-incoming`` takes it for a migration's stream. The memory of a restored machine maps
its layers' files privately (rust/map), so the pages that it changed are those it has for itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from qemu.qmp import QMPClient, QMPError

from agentenv import _core
from agentenv.engine.contract import MachineSpec, Saved, SavedPages, SavePlan
from agentenv.engine.qemu import argv, qmp
from agentenv.engine.qemu.argv import RunFiles
from agentenv.errors import InfraError, faults

# Copying 50 MB takes 15 ms; this is for many GB on a machine that swaps.
DEADLINE = 120.0
# More is written while the guest stands still, rather than held in our memory.
HELD_AT_MOST = 512 << 20
_MEMFD = "/memfd:memory-backend-memfd"


async def save(files: RunFiles, pid: int, plan: SavePlan) -> Saved:
    """See ``Machine.save``."""
    phases: dict[str, float] = {}
    write = _nothing
    state = b""
    async with qmp.connected(files.qmp, DEADLINE) as monitor:
        with _timed(phases, "stop"):
            await monitor.execute("stop")
        try:
            if plan.memory is not None:
                with _timed(phases, "devices"):
                    state = await _save_devices(monitor, files)
            if plan.memory is not None:
                write = await _take(files, pid, plan, phases)
            if plan.disk is not None:  # last: what can fail was done
                with _timed(phases, "disk"):
                    await _seal(monitor, plan.disk)
                await monitor.execute("cont")
        except BaseException:
            with suppress(QMPError):
                await asyncio.shield(monitor.execute("cont"))
            raise
    phases["stopped"] = round(sum(phases.values()), 6)
    return Saved(state, write, phases)


async def _nothing() -> SavedPages:
    return SavedPages(b"", 0)


async def _take(
    files: RunFiles, pid: int, plan: SavePlan, phases: dict[str, float]
) -> Callable[[], Awaitable[SavedPages]]:
    """Take the machine's own pages; copied if it goes on and they are not too many."""
    with _timed(phases, "scan"):
        pages = await asyncio.to_thread(_pages, files, pid)
    source: _core.Pages | _core.HeldPages = pages
    copied = plan.disk is not None and pages.size <= HELD_AT_MOST
    if copied:
        with _timed(phases, "copy"), _reading():
            source = await asyncio.to_thread(pages.copy)

    async def write() -> SavedPages:
        assert plan.memory is not None
        with _timed(phases, "write"), _reading():
            return SavedPages(*await asyncio.to_thread(source.write, plan.memory))

    if plan.disk is None or copied:
        return write
    written = await write()

    async def done() -> SavedPages:
        return written

    return done


async def _save_devices(monitor: QMPClient, files: RunFiles) -> bytes:
    arguments = {"filename": str(files.devices), "live": False}
    await monitor.execute("xen-save-devices-state", arguments)
    with faults("the devices' state could not be read"):
        state = files.devices.read_bytes()
        files.devices.unlink()
    return state


async def _seal(monitor: QMPClient, overlay: Path) -> None:
    """Let the guest write to ``overlay``; what it wrote so far is written no more."""
    node = _node_of(overlay)
    await monitor.execute("blockdev-add", argv.writable(node, overlay, None))
    arguments = {"node": await _top(monitor), "overlay": node}
    await monitor.execute("blockdev-snapshot", arguments)


def _node_of(overlay: Path) -> str:
    """Its node keeps this name when the file has got another."""
    return f"{argv.DISK_NODE}-{overlay.stem}"


async def writes(files: RunFiles, overlay: Path) -> bool:
    """See ``Machine.writes``."""
    async with qmp.connected(files.qmp, DEADLINE) as monitor:
        return await _top(monitor) == _node_of(overlay)


async def _top(monitor: QMPClient) -> str:
    """The node that the guest writes now."""
    devices = cast("list[dict[str, Any]]", await monitor.execute("query-block"))
    nodes = [device["inserted"]["node-name"] for device in devices if "inserted" in device]
    return next(node for node in nodes if node.startswith(argv.DISK_NODE))


def _pages(files: RunFiles, pid: int) -> _core.Pages:
    """Those that no file has but the machine."""
    with _reading():
        if (files.memory / "at").exists():
            at, size = map(int, (files.memory / "at").read_text().split())
            return _core.Pages.find(pid, at, size, False)
        at, size = memory_of(Path(f"/proc/{pid}/maps").read_text())
        return _core.Pages.find(pid, at, size, True)


def memory_of(maps: str) -> tuple[int, int]:
    """Address and bytes of a booted machine's memory."""
    for line in maps.splitlines():
        if _MEMFD in line:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            return begin, end - begin
    raise InfraError("the machine's memory is not found", code="engine_failed")


@contextmanager
def _reading() -> Generator[None]:
    with faults("the machine's memory could not be saved"):
        yield


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Generator[None]:
    begun = time.monotonic()
    yield
    phases[name] = round(time.monotonic() - begun, 6)


async def load(files: RunFiles, spec: MachineSpec) -> None:
    """Give a waiting machine memory, disks and its devices' state, and let it run.

    Raises InfraError.
    """
    async with qmp.connected(files.qmp, DEADLINE) as monitor:
        await monitor.execute("object-add", argv.memory(spec, files))
        link = {"path": "/machine", "property": "memory-backend", "value": argv.MEMORY}
        await monitor.execute("qom-set", link)
        for node in argv.disks(spec, files):
            await monitor.execute("blockdev-add", node)
        await monitor.execute("x-exit-preconfig")
        await monitor.execute("migrate-incoming", {"uri": f"file:{files.devices}"})
        while (status := await _incoming(monitor)) != "completed":
            if status == "failed":
                raise InfraError("QEMU does not take the saved state", code="restore_failed")
            await asyncio.sleep(0.001)
        await monitor.execute("cont")
    files.devices.unlink(missing_ok=True)


async def _incoming(monitor: QMPClient) -> str:
    answer = cast("dict[str, Any]", await monitor.execute("query-migrate"))
    return str(answer.get("status", ""))
