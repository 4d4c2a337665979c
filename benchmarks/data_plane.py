"""The data plane against nginx: one server reached straight, through nginx, and through the edge.

The server is in a guest's namespace behind a router's, as on a node, but native: under an
emulated guest every proxy looks the same. nginx cannot step into a namespace, so it gets its
place in the router's, where it needs not to. Ways take turns; figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.edge import rig
from tests.server import TestServer

from benchmarks.machine import heading, row

PACKAGES = {"wrk": "wrk", "nginx": "nginx-light", "curl": "curl"}
CONNECTIONS = (1, 32, 256)
ROUNDS = 3
SECONDS = 4  # of load in each round
SMALL, LARGE = 1 << 10, 512 << 20  # bytes
FILES, SINK = 8080, 8081  # ports of the guest
TICK = os.sysconf("SC_CLK_TCK")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

NGINX = """
daemon off; master_process off; user root; pid {folder}/{name}.pid; error_log {folder}/{name}.log;
worker_rlimit_nofile 65536;
events {{ worker_connections 8192; }}
http {{
    access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_requests 1000000000;
    client_body_temp_path {folder}/{name}; proxy_temp_path {folder}/{name};
    fastcgi_temp_path {folder}/{name}; uwsgi_temp_path {folder}/{name};
    scgi_temp_path {folder}/{name}; client_max_body_size 0;
    {servers}
}}
"""
ORIGIN = "server {{ listen {guest}:{port} backlog=4096; root {folder}/files; }}"
PROXY = """
upstream up{port} {{ server {guest}:{port}; keepalive 256; keepalive_requests 1000000000; }}
server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
        proxy_pass http://up{port}; proxy_http_version 1.1; proxy_set_header Connection "";
        proxy_set_header Host $host; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        proxy_buffering off; proxy_request_buffering off;
        proxy_buffer_size 256k; proxy_buffers 4 256k;
    }}
}}
"""
# Takes uploads and forgets them, faster than nginx could store them.
TAKER = """
import socket, sys, threading
def serve(client):
    room = bytearray(1 << 20)
    with client, client.makefile("rb", 0) as stream:
        while head := stream.readline():
            length = 0
            while (line := stream.readline()) != b"\\r\\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line[15:])
            while length and (got := client.recv_into(room, min(length, 1 << 20))):
                length -= got
            client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    while True:
        threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
"""


@dataclass(frozen=True)
class Way:
    """How a client gets to a port of the guest: from where, and over what."""

    name: str
    netns: str | None
    url: str  # {port} in it stands for the guest's port
    pid: int | None = None

    def argv(self, port: int, path: str, *words: str) -> tuple[str, ...]:
        """A client's command line with the URL at its end."""
        inside = ("ip", "netns", "exec", self.netns) if self.netns else ()
        host = ("-H", f"Host: {port}-{rig.ID}.example.org")
        return (*inside, *words, *host, self.url.format(port=port) + path)

    def cpu(self) -> float:
        """Seconds that its process has used."""
        if self.pid is None:
            return 0.0
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK


@dataclass(frozen=True)
class Load:
    """What one round showed; times in seconds."""

    rate: float
    median: float
    ninety_ninth: float
    cpu: float  # of the proxy, for each request


def run(server: TestServer) -> None:
    del server  # its guest is emulated
    missing = [package for tool, package in PACKAGES.items() if not shutil.which(tool)]
    if missing:
        print(f"skipped: install {' '.join(missing)}")
        return
    asyncio.run(_measure())


async def _measure() -> None:
    folder = Path(tempfile.mkdtemp(prefix="edge-"))
    try:
        async with _ways(folder) as ways:
            print(
                f"medians of {ROUNDS} rounds of {SECONDS} s; {SMALL} byte file; nginx: one process, "
                f"unbuffered, kept-alive upstream; edge as it is, {os.cpu_count()} threads; all "
                f"share the machine's CPUs with wrk (one thread) and the server (one process)\n"
            )
            requests = _print_requests(ways)
            rates = _print_throughput(ways, folder)
            _print_verdict(requests, rates)
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def _ways(folder: Path) -> AsyncIterator[list[Way]]:
    (folder / "files").mkdir()
    (folder / "files" / "small").write_bytes(b"x" * SMALL)
    for name in ("files/large", "upload"):
        with (folder / name).open("wb") as file:
            file.truncate(LARGE)
    proxied = "".join(PROXY.format(guest=rig.GUEST, port=port) for port in (FILES, SINK))
    stored = ORIGIN.format(guest=rig.GUEST, port=FILES, folder=folder)
    sink = (sys.executable, "-c", TAKER, rig.GUEST, str(SINK))
    with rig.slot() as slot:
        async with (
            _nginx(folder, slot.guest, "origin", stored),
            _nginx(folder, slot.router, "proxy", proxied) as proxy,
            rig.process("ip", "netns", "exec", slot.guest, *sink),
            rig.edge(folder) as edge,
        ):
            await edge.control.sync([slot.route()], [])
            ways = [
                Way("straight", slot.router, f"http://{rig.GUEST}:{{port}}"),
                Way("nginx", slot.router, "http://127.0.0.1:{port}", proxy.pid),
                Way("agentenv-edge", None, edge.url, edge.child.pid),
            ]
            for way in ways:
                _wait_for(way)
            yield ways


@asynccontextmanager
async def _nginx(folder: Path, netns: str, name: str, servers: str):
    path = folder / f"{name}.conf"
    path.write_text(NGINX.format(folder=folder, name=name, servers=servers))
    words = ("nginx", "-p", str(folder), "-e", str(folder / f"{name}.log"), "-c", str(path))
    async with rig.process("ip", "netns", "exec", netns, *words) as child:
        yield child


def _wait_for(way: Way) -> None:
    for port, path in ((FILES, "/small"), (SINK, "/")):
        words = ("curl", "-sSf", "-o", "/dev/null", "--retry", "10", "--retry-delay", "1")
        again = ("--retry-all-errors", "-m", "5")
        subprocess.run(way.argv(port, path, *words, *again), check=True, timeout=30)


def _load(way: Way, connections: int) -> Load:
    words = ("wrk", "-t1", f"-c{connections}", f"-d{SECONDS}s", "--latency")
    before = way.cpu()
    told = subprocess.run(
        way.argv(FILES, "/small", *words), check=True, capture_output=True, text=True
    ).stdout
    if "Non-2xx" in told or "Socket errors" in told:
        raise RuntimeError(told)
    count = int(_found(r"(\d+) requests in", told)[0])
    at = {p: _found(rf"{p}%\s+([\d.]+)(us|ms|s)\b", told) for p in (50, 99)}
    median, ninety_ninth = (float(value) * UNITS[unit] for value, unit in at.values())
    rate = float(_found(r"Requests/sec:\s+([\d.]+)", told)[0])
    return Load(rate, median, ninety_ninth, (way.cpu() - before) / count)


def _found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match, text
    return match.groups()


def _middle(rounds: Iterable[Load]) -> Load:
    columns = zip(*((r.rate, r.median, r.ninety_ninth, r.cpu) for r in rounds), strict=True)
    return Load(*(statistics.median(column) for column in columns))


def _print_requests(ways: list[Way]) -> dict[tuple[str, int], Load]:
    names = ("requests/s", "against nginx", "p50 / p99 ms", "added p50 / p99 ms", "CPU us/request")
    heading("connections", "way", *names)
    found: dict[tuple[str, int], Load] = {}
    for connections in CONNECTIONS:
        rounds: dict[str, list[Load]] = defaultdict(list)
        for _ in range(ROUNDS):
            for way in ways:
                rounds[way.name].append(_load(way, connections))
        found |= {(name, connections): _middle(loads) for name, loads in rounds.items()}
        straight, nginx = (found[name, connections] for name in ("straight", "nginx"))
        for way in ways:
            it = found[way.name, connections]
            added = (it.median - straight.median, it.ninety_ninth - straight.ninety_ninth)
            row(
                connections, way.name, f"{it.rate:.0f}", f"{it.rate / nginx.rate:.2f}",
                f"{it.median * 1e3:.2f} / {it.ninety_ninth * 1e3:.2f}",
                f"{added[0] * 1e3:.2f} / {added[1] * 1e3:.2f}",
                f"{it.cpu * 1e6:.0f}",
            )  # fmt: skip
    return found


def _rate(way: Way, folder: Path, *, upload: bool) -> float:
    """Bytes a second of one transfer by curl."""
    speed = "%{speed_upload}" if upload else "%{speed_download}"
    words = ["curl", "-sSf", "-o", "/dev/null", "-w", speed]
    if upload:
        words += ["-T", str(folder / "upload"), "-H", "Expect:"]
    port, path = (SINK, "/upload") if upload else (FILES, "/large")
    argv = way.argv(port, path, *words)
    return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


def _print_throughput(ways: list[Way], folder: Path) -> dict[tuple[str, bool], float]:
    print(f"\none transfer of {LARGE >> 20} MiB:\n")
    heading("way", "download MB/s", "against nginx", "upload MB/s", "against nginx")
    rounds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for upload in (False, True):
        _rate(ways[0], folder, upload=upload)  # the files are read from memory from here on
    for _ in range(ROUNDS):
        for upload in (False, True):
            for way in ways:
                rounds[way.name, upload].append(_rate(way, folder, upload=upload))
    found = {key: statistics.median(rates) for key, rates in rounds.items()}
    for way in ways:
        cells: list[str] = []
        for upload in (False, True):
            rate = found[way.name, upload]
            cells += [f"{rate / 1e6:.0f}", f"{rate / found['nginx', upload]:.2f}"]
        row(way.name, *cells)
    return found


def _print_verdict(
    requests: dict[tuple[str, int], Load], rates: dict[tuple[str, bool], float]
) -> None:
    edge = "agentenv-edge"
    share = min(requests[edge, c].rate / requests["nginx", c].rate for c in CONNECTIONS)
    flow = min(rates[edge, upload] / rates["nginx", upload] for upload in (False, True))
    added = requests[edge, 1].median - requests["straight", 1].median
    print()
    heading("target", "measured", "")
    for target, figure, met in (
        ("at least 0.5 of nginx's requests/s", f"{share:.2f}", share >= 0.5),
        ("at least 0.8 of nginx's throughput", f"{flow:.2f}", flow >= 0.8),
        ("at most 0.5 ms added, p50, 1 connection", f"{added * 1e3:.2f} ms", added <= 0.5e-3),
    ):
        row(target, figure, "met" if met else "MISSED")
