"""The node's block server: mounted, run under the supervisor, asked what holds reads up.

The supervisor keeps the mount's descriptor and starts a server that ended again, so the files that
sandboxes have open live through it. Where both died, the mount is dead and a new one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentenv.concurrency import Tasks
from agentenv.errors import Conflict, InfraError, NotFound
from agentenv.host import fuse
from agentenv.host.process import Launcher, ProcessSpec, command_line, replaced
from agentenv.layer.blockd import BlockClient, BlockServerOptions, Fault, blockd_argv

log = logging.getLogger(__name__)

NAME = "blockd"
FD = 3  # the mount's descriptor in the server
START_DEADLINE = 30.0  # seconds from its start to its answer
ASK_AGAIN = 1.0  # seconds after a question that failed
LONG_POLL = 60.0
STOP_DEADLINE = 5.0
QUICK_ENDS = 4  # ends one after another that say it will not come up
MOUNT_MODE = 0o711

# Seconds in which a server that has ended for good is told from one in a pause before its restart.
ABOUT_TO_START = 0.2
ADOPT = "--adopt"  # the mount was served before

Recovered = Callable[[set[str]], Awaitable[None]]
Lost = Callable[[], Awaitable[None]]


def _option(argv: tuple[str, ...], name: str) -> str | None:
    return next((value for word, value in itertools.pairwise(argv) if word == name), None)


class BlockServer:
    """``start`` first, ``close`` last.

    ``recovered`` is told the holders whose reads failed and come through again, ``lost`` when no
    file can be read any more that was opened before.
    """

    def __init__(self, options: BlockServerOptions, mount: Path, launcher: Launcher) -> None:
        self._options, self._mount, self._launcher = options, mount, launcher
        self._log = options.control.with_suffix(".log")
        self.client = BlockClient(options.control, mount)
        self._tasks = Tasks()
        self._faults: list[Fault] = []

    async def start(self) -> bool:
        """Take over the server that runs, or bring one up; whether that was needed: then no file
        of an earlier one can be read any more. Raises InfraError, Conflict (``store_in_use``)."""
        fresh = await self._gone()
        if fresh:
            await self._bring_up()
        else:
            await self._answering()
            await self._renew()
        await self._answering()
        await asyncio.to_thread(fuse.raise_read_ahead, self._mount)
        return fresh

    async def _gone(self) -> bool:
        """Whether there is no server, and none is about to be started again."""
        status = await self._launcher.status(NAME)
        if status is None or status.running:
            return status is None
        with contextlib.suppress(NotFound, TimeoutError):
            async with asyncio.timeout(ABOUT_TO_START):
                await self._launcher.wait(NAME)
                return True
        return False

    async def _renew(self) -> None:
        """Have one of other options, or of an older program, followed by one on its mount."""
        status = await self._launcher.status(NAME)
        running = command_line(status.pid) if status else ()
        wanted = blockd_argv(self._options, FD)
        same = tuple(word for word in running if word != ADOPT) == wanted
        if same and status and not replaced(status.pid):
            return
        store = _option(running, "--store")
        if store != self._options.store and (await self.client.stats())["stacks"]:
            raise Conflict(
                "sandboxes of this home run on another store",
                why=f"they read from {store}",
                fix="start the server on that one, or end them: aenv down",
                code="store_in_use",
            )
        log.info("the block server is followed by a new one")
        await self._end()
        spec = ProcessSpec(name=NAME, argv=(*wanted, ADOPT), log=self._log, restart=True)
        await self._launcher.launch(spec)

    async def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            await self._launcher.stop(NAME, number)
            with contextlib.suppress(NotFound, TimeoutError):
                async with asyncio.timeout(STOP_DEADLINE):
                    await self._launcher.wait(NAME)
                break

    async def _bring_up(self) -> None:
        options = self._options
        await self._launcher.forget(NAME)
        await asyncio.to_thread(fuse.unmount, self._mount)
        await asyncio.to_thread(shutil.rmtree, options.state, ignore_errors=True)
        self._mount.mkdir(mode=MOUNT_MODE, parents=True, exist_ok=True)
        fd = await asyncio.to_thread(fuse.mount, self._mount)
        try:
            argv = blockd_argv(options, FD)
            spec = ProcessSpec(name=NAME, argv=argv, log=self._log, restart=True)
            await self._launcher.launch(spec, [fd])
        finally:
            os.close(fd)

    async def _answering(self) -> None:
        status = await self._launcher.status(NAME)
        before = status.restarts if status else 0
        try:
            async with asyncio.timeout(START_DEADLINE):
                while True:
                    try:
                        await self.client.hello()
                        return
                    except InfraError as error:
                        if error.why.startswith("it speaks"):
                            raise
                    status = await self._launcher.status(NAME)
                    if status and status.restarts - before > QUICK_ENDS:
                        raise self._no_start()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise self._no_start() from None

    def _no_start(self) -> InfraError:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        said = [line for line in lines if not line.startswith("usage:")]
        return InfraError(
            "the block server does not start",
            why=said[-1] if said else "it does not answer",
            fix="aenv config shows what it was told: store, cache_size, peers",
            code="block_server_down",
        )

    def watch(self, recovered: Recovered, lost: Lost) -> None:
        self._tasks.start(self._follow(recovered, lost), "watch block server")

    async def _follow(self, recovered: Recovered, lost: Lost) -> None:
        version, failed = -1, set[str]()
        while True:
            try:
                wait = LONG_POLL if version >= 0 else 0.0
                version, self._faults = await self.client.faults(version, wait)
            except InfraError as error:
                log.warning("%s: %s", error.message, error.why)
                version = -1
                await asyncio.sleep(ASK_AGAIN)
                await self._return(lost)
                continue
            now = {holder for fault in self._faults if fault.failed for holder in fault.holders}
            for fault in self._faults:
                log.warning("reads of %s wait: %s", ", ".join(fault.holders), fault.cause)
            if back := failed - now:
                await recovered(back)
            failed = now

    async def _return(self, lost: Lost) -> None:
        """If it died together with the supervisor, nobody starts it again but us."""
        try:
            await self._launcher.ensure()
            if await self._gone():
                log.error("block server and supervisor died together; their mount is lost")
                await self.start()
                await lost()
        except InfraError as error:
            log.warning("the block server is not back yet: %s", error.message)

    def fault(self, holder: str) -> Fault | None:
        """What holds up the reads of a holder."""
        found = (fault for fault in self._faults if holder in fault.holders)
        return next(iter(sorted(found, key=lambda fault: not fault.failed)), None)

    def objects(self, holder: str) -> dict[str, Any]:
        """For `aenv inspect`."""
        fault = self.fault(holder)
        return {"storage_fault": asdict(fault) if fault else None}

    async def close(self, *, everything: bool) -> None:
        """Let go of the server; with ``everything`` end it and unmount."""
        await self._tasks.close()
        if not everything:
            return
        await self._end()
        await self._launcher.forget(NAME)
        await asyncio.to_thread(fuse.unmount, self._mount, force=True)
        await asyncio.to_thread(shutil.rmtree, self._options.state, ignore_errors=True)
        for path in (self._options.control, self._log):
            path.unlink(missing_ok=True)
