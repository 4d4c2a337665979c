"""The data plane against going straight to the guest: latency and throughput of the same server.

Straight is a socket made inside the sandbox's network namespace; both ends are this process.
"""

from __future__ import annotations

import http.client
import socket
import statistics
import time
from pathlib import Path

from tests.server import TestServer

from agentenv.host import netns
from benchmarks.machine import heading, row, sandbox, summary

ROUNDS = 300
SIZE = 64 << 20  # bytes
GUEST = ("10.233.0.2", 49983)


class StraightConnection(http.client.HTTPConnection):
    """HTTP over a socket made in another network namespace."""

    def __init__(self, where: Path) -> None:
        super().__init__(GUEST[0], GUEST[1])
        self._where = where

    def connect(self) -> None:
        self.sock = netns.inside(
            self._where, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        )
        self.sock.connect(GUEST)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def run(server: TestServer) -> None:
    with sandbox(server) as made:
        sandbox_id = made["sandboxID"]
        where = Path(server.inspect(sandbox_id)["objects"]["netns"])
        headers = {"X-Access-Token": made["envdAccessToken"], "E2b-Sandbox-Id": sandbox_id}
        fill = f"head -c {SIZE} /dev/zero > /dev/shm/zeroes"
        server.cli("exec", sandbox_id, "-u", "root", "--", "sh", "-c", fill, check=True)
        straight = StraightConnection(where)
        proxied = http.client.HTTPConnection("127.0.0.1", server.port)
        heading("way", "GET /health on a kept connection", "GET of 64 MiB", "against straight")
        base: tuple[float, float] | None = None
        for name, connection in (("straight", straight), ("through the data plane", proxied)):
            latency = _latency(connection, headers)
            rate = statistics.median(_rate(connection, headers) for _ in range(3))
            median = statistics.median(latency)
            base = base or (median, rate)
            ratio = f"{median / base[0]:.2f} / {rate / base[1]:.2f}"
            row(name, summary(latency), f"{rate / 1e6:.0f} MB/s", ratio)
            connection.close()
        _edge_alone(server)


def _latency(connection: http.client.HTTPConnection, headers: dict[str, str]) -> list[float]:
    found: list[float] = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        connection.request("GET", "/health", headers=headers)
        connection.getresponse().read()
        found.append(time.perf_counter() - begun)
    return sorted(found[10:])


def _rate(connection: http.client.HTTPConnection, headers: dict[str, str]) -> float:
    begun = time.perf_counter()
    connection.request("GET", "/files?path=/dev/shm/zeroes&username=root", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    size = 0
    while chunk := answer.read(1 << 20):
        size += len(chunk)
    assert size == SIZE
    return size / (time.perf_counter() - begun)


def _edge_alone(server: TestServer) -> None:
    """The API through the data plane, where no emulated guest is the slower side."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    latency = _latency(connection, {})
    connection.close()
    print(f"\nAPI GET /health through the data plane: {summary(latency)}")
