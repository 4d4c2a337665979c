"""The data plane's process and what it is told: who can be reached, whose names are resolved.

`agentenv-edge` outlives this server. What it should know is kept here, so that an edge that
was killed is started again and told the whole truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentenv.concurrency import Tasks
from agentenv.errors import InfraError, NotFound
from agentenv.host.process import Launcher, ProcessSpec, ProcessStatus, command_line
from agentenv.node.edge import EdgeClient, Resolver, Route, edge_argv
from agentenv.node.wakes import Wake, Wakes

log = logging.getLogger(__name__)

NAME = "edge"
# A stub resolver's own upstreams come before the stub, which answers on the host's loopback only.
RESOLV_FILES = ("/run/systemd/resolve/resolv.conf", "/etc/resolv.conf")
START_DEADLINE = 20.0  # seconds from its start to its answer
STOP_DEADLINE = 5.0
RESTART_DELAY = 0.5  # seconds; an edge that ends at once must not be restarted in a tight loop


@dataclass(frozen=True, slots=True)
class DataPlaneConfig:
    """``listen`` is HOST:PORT; the host may be a name with several addresses."""

    binary: Path
    folder: Path
    listen: str
    api: Path
    api_wait: float
    tls: tuple[Path, Path] | None = None


class DataPlane:
    """``start`` first (not where nobody is let in), ``close`` last."""

    def __init__(self, config: DataPlaneConfig, launcher: Launcher) -> None:
        self._config, self._launcher = config, launcher
        self._control = config.folder / "edge.sock"
        self._log = config.folder / "edge.log"
        self.client = EdgeClient(self._control)
        # Calls that wait for news must not hold up the others.
        self._wakes = Wakes(EdgeClient(self._control), self.client)
        self._known: dict[str, tuple[Route, Resolver | None]] = {}
        self._tasks = Tasks()
        self._running = False

    async def start(self) -> None:
        """Bring the edge up, or take over one that serves the same addresses.

        Raises InfraError (``edge_failed``) if it does not come up: the port may be taken.
        """
        await self._ensure()
        self._running = True
        self._tasks.start(self._watch(), "watch data plane")

    async def _ensure(self) -> None:
        argv = await asyncio.to_thread(self._argv)
        status = await self._launcher.status(NAME)
        if status and status.running and command_line(status.pid) == argv:
            await self.client.hello()
            return
        await self._end(status)
        spec = ProcessSpec(name=NAME, argv=argv, log=self._log)
        await self._launcher.launch(spec)
        try:
            async with asyncio.timeout(START_DEADLINE):
                while not await self._answers():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise self._failed("it does not answer") from None

    async def _answers(self) -> bool:
        status = await self._launcher.status(NAME)
        if status is None or not status.running:
            raise self._failed("it ended")
        try:
            await self.client.hello()
        except InfraError:
            return False
        return True

    def _failed(self, what: str) -> InfraError:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return InfraError(
            f"the data plane did not start on {self._config.listen}",
            why=lines[-1] if lines else what,
            fix="give another --listen",
            code="edge_failed",
        )

    def _argv(self) -> tuple[str, ...]:
        host, _, port = self._config.listen.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise InfraError(
                f"{host} has no address", why=str(error), fix="give another --listen",
                code="edge_failed",
            ) from error  # fmt: skip
        listen = [f"[{a[0]}]:{a[1]}" if ":" in str(a[0]) else f"{a[0]}:{a[1]}" for *_, a in found]
        return edge_argv(
            self._config.binary,
            listen=list(dict.fromkeys(listen)),
            api=self._config.api,
            control=self._control,
            api_wait=self._config.api_wait,
            tls=self._config.tls,
        )

    async def _end(self, status: ProcessStatus | None) -> None:
        """Take an edge away: it finishes what is under way unless that takes too long."""
        if status is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            await self._launcher.signal(NAME, number)
            try:
                async with asyncio.timeout(STOP_DEADLINE):
                    await self._launcher.wait(NAME)
                break
            except TimeoutError:
                continue
            except NotFound:
                break
        await self._launcher.forget(NAME)

    async def _watch(self) -> None:
        """Bring an edge that ended back, with all it knew."""
        while True:
            try:
                with contextlib.suppress(NotFound):  # a new supervisor that never knew it
                    await self._launcher.wait(NAME)
                log.warning("the data plane ended; starting it again")
                await self._launcher.ensure()
                await self._ensure()
                await self.sync()
            except InfraError as error:
                log.warning("the data plane is not back yet: %s", error.message)
            await asyncio.sleep(RESTART_DELAY)

    def know(self, route: Route, resolver: Resolver | None) -> None:
        """Have ``sync`` tell of it."""
        self._known[route.id] = (route, resolver)

    async def sync(self) -> None:
        """Tell the edge the whole truth; nothing to do where none was started."""
        if not self._running:
            return
        routes = [route for route, _ in self._known.values()]
        resolvers = [resolver for _, resolver in self._known.values() if resolver]
        for failed in await self.client.sync(routes, resolvers):
            log.error("the data plane could not open %s: %s", failed.name, failed.message)

    async def put(self, route: Route, resolver: Resolver | None) -> None:
        """Publish a sandbox, or what changed of it. Raises InfraError."""
        _, earlier = self._known.get(route.id, (route, None))
        self._known[route.id] = (route, resolver)
        await self.client.put(route)
        if resolver:
            await self.client.dns_up(resolver)
        elif earlier:
            await self.client.dns_down(earlier.slot)

    async def asleep(self, route: Route) -> None:
        """Cut what is open on a sandbox that stays known; told later if the edge is down now."""
        _, earlier = self._known.get(route.id, (route, None))
        self._known[route.id] = (route, None)
        if not self._running:
            return
        try:
            await self.client.put(route)
            if earlier:
                await self.client.dns_down(earlier.slot)
        except InfraError as error:
            log.warning("the data plane was not told that %s sleeps: %s", route.id, error.message)

    def watch_wakes(self, wake: Wake) -> None:
        """Have ``wake`` called for each sandbox that requests are held for, as a task of its own.

        It ends by the sandbox's route being put awake, or raises: the requests are answered so.
        """
        self._wakes.watch(wake)

    async def stop_wakes(self) -> None:
        """Wake nobody any more; what is held stays so for the next server."""
        await self._wakes.stop()

    async def drop(self, sandbox_id: str) -> None:
        """Cut a sandbox off; an edge that is down is told by not being told any more."""
        known = self._known.pop(sandbox_id, None)
        if not self._running:
            return
        try:
            await self.client.drop(sandbox_id)
            if known and known[1]:
                await self.client.dns_down(known[1].slot)
        except InfraError as error:
            log.warning("the data plane could not drop %s: %s", sandbox_id, error.message)

    async def close(self, *, everything: bool) -> None:
        """Let go of the edge; with ``everything`` end it."""
        await self._wakes.close()
        await self._tasks.close()
        self._running = False
        await self.client.close()
        if everything:
            await self._end(await self._launcher.status(NAME))
            for path in (self._control, self._log):
                path.unlink(missing_ok=True)


def name_servers(text: str) -> tuple[str, ...]:
    """``IP:53`` of each name server in a resolv.conf, scopes dropped."""
    found: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            address = words[1].partition("%")[0]
            found.append(f"[{address}]:53" if ":" in address else f"{address}:53")
    return tuple(found)


def upstreams(configured: tuple[str, ...], files: Mapping[str, str]) -> tuple[str, ...]:
    """The configured servers, else the host's; a stub's own upstreams before the stub."""
    if configured:
        return tuple(a if ":" in a else f"{a}:53" for a in configured)
    for path in RESOLV_FILES:
        if found := name_servers(files.get(path, "")):
            return found
    return ()
