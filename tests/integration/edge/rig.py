"""What the edge's tests stand on: namespaces joined by veth, servers in them, a real edge."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.server import built

from agentenv.node.edge import EdgeClient, Route, Traffic, edge_argv

GUEST, GATEWAY = "10.233.0.2", "10.233.0.1"
PORT, WEBSOCKET_PORT, AGENT_PORT = 8080, 8081, 49983
ID = "abcd0123456789efghij"
MARK = {"EDGE_TESTS_OF": str(os.getpid())}  # by which what was left is known
_numbers = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


@dataclass(frozen=True)
class Slot:
    """A router namespace and a guest namespace behind it, as a node prepares them."""

    router: str
    guest: str

    @property
    def netns(self) -> str:
        return f"/run/netns/{self.router}"

    def route(self, **changes) -> Route:
        return replace(Route(ID, 1, self.netns, GUEST), **changes)

    def asleep(self, **changes) -> Route:
        return self.route(netns="", address="", asleep=True, **{"wakes": True} | changes)


@contextlib.contextmanager
def slot():
    number = f"{os.getpid()}-{next(_numbers)}"
    made = Slot(f"edge-r{number}", f"edge-g{number}")
    try:
        for name in (made.router, made.guest):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", made.router, "link", "add", "tap0", "type", "veth", "peer", "eth0")
        ip("-n", made.router, "link", "set", "eth0", "netns", made.guest)
        for name, link, address in (
            (made.router, "tap0", GATEWAY),
            (made.guest, "eth0", GUEST),
        ):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", link)
            ip("-n", name, "link", "set", link, "up")
        yield made
    finally:
        for name in (made.router, made.guest):
            if Path(f"/run/netns/{name}").exists():
                ip("netns", "del", name)


@contextlib.asynccontextmanager
async def process(*argv: str | Path, stderr=None) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process whose first line is out; killed at the end."""
    child = await asyncio.create_subprocess_exec(
        *map(str, argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=os.environ | MARK | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


@contextlib.asynccontextmanager
async def guest_server(slot: Slot, port: int = PORT):
    script = Path(__file__).with_name("guest.py")
    words = (sys.executable, script, GUEST, port, WEBSOCKET_PORT)
    async with process("ip", "netns", "exec", slot.guest, *map(str, words)) as child:
        assert await child.stdout.readline() == b"ready\n"
        yield child


@dataclass
class Edge:
    child: asyncio.subprocess.Process
    port: int
    folder: Path
    control: EdgeClient
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def api(self) -> Path:
        return self.folder / "api.sock"

    def rss(self) -> int:
        """Resident memory in bytes."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    async def under_way(self, count: int, sandbox_id: str = ID) -> None:
        """Return once that many requests for a sandbox are under way."""
        async with asyncio.timeout(20):
            while (await self.control.stats()).sandboxes[sandbox_id].active != count:
                await asyncio.sleep(0.01)

    async def all_ended(self, sandbox_id: str) -> Traffic:
        """The figures of a sandbox once nothing is under way; a client may see the end earlier."""
        async with asyncio.timeout(10):
            while (traffic := (await self.control.stats()).sandboxes[sandbox_id]).active:
                await asyncio.sleep(0.01)
        return traffic

    def terminate(self) -> None:
        self.child.send_signal(signal.SIGTERM)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


def argv(folder: Path, *, port: int = 0, **options) -> tuple[str, ...]:
    return edge_argv(
        built("agentenv-edge"),
        listen=[f"127.0.0.1:{port}"],
        api=folder / "api.sock",
        control=folder / "control.sock",
        **options,
    )


@contextlib.asynccontextmanager
async def edge(
    folder: Path, *, port: int = 0, api_wait=10.0, wake_wait=60.0, drain=5.0, tls=None, stderr=None
):
    waits = {"api_wait": api_wait, "wake_wait": wake_wait, "drain": drain}
    words = argv(folder, port=port, tls=tls, **waits)
    async with process(*words, stderr=stderr) as child:
        ready = json.loads(await child.stdout.readline())
        bound = int(ready["listen"][0].rpartition(":")[2])
        control = EdgeClient(folder / "control.sock")
        running = Edge(child, bound, folder, control, "https" if tls else "http")
        try:
            yield running
        finally:
            await running.control.close()


def head(path: str, *lines: str, method: str = "GET", port: int = PORT, version="1.1") -> bytes:
    """A request head for the test's sandbox, as it goes over the wire."""
    host = f"Host: {port}-{ID}.example.org"
    return "\r\n".join([f"{method} {path} HTTP/{version}", host, *lines, "", ""]).encode()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    raw = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = raw[:-4].split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size)
    assert await reader.readexactly(2) == b"\r\n"
    return data
