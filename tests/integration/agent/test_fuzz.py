"""Whatever comes over the wire, the agent answers the next one, in bounded memory."""

from __future__ import annotations

import base64
import json
import random
import socket
import struct

import pytest

SEED = 20261201
CONNECTIONS = 4500
ROUTES = (
    "/health", "/metrics", "/envs", "/files", "/files/compose", "/archive", "/tcp", "/nowhere",
    *(f"/process.Process/{m}" for m in (
        "List", "Start", "Connect", "Update", "SendInput", "StreamInput", "SendSignal", "CloseStdin", "X")),
    *(f"/filesystem.Filesystem/{m}" for m in (
        "Stat", "ListDir", "MakeDir", "Move", "Remove", "WatchDir", "CreateWatcher",
        "GetWatcherEvents", "RemoveWatcher", "X")),
)  # fmt: skip
# Nothing here may be made or removed outside the test's folder: paths lead nowhere or below it.
WORDS = ("", "\0", "~", "~root", "..", "/none/../..", "x" * 5000, "ä\u2028", "\ud7ff", "/proc/none")


class Source:
    """Hostile input, the same at every run."""

    def __init__(self, folder: str) -> None:
        self.random, self.folder = random.Random(SEED), folder

    def value(self, depth: int = 0):
        kind = self.random.randrange(9 if depth < 3 else 6)
        if kind == 0:
            return self.random.choice((None, True, False, -1, 0, 2**31, 2**63, 1e308, 9**30))
        if kind in (1, 2):
            return self.random.choice(WORDS)
        if kind in (3, 4):
            return f"{self.folder}/{self.random.choice(('a', 'b', 'a/b', 'x' * 300))}"
        if kind == 5:
            return base64.b64encode(self.random.randbytes(20)).decode()
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        return self.message(depth + 1)

    def message(self, depth: int = 0) -> dict:
        fields = (
            "path", "source", "destination", "depth", "recursive", "watcherId", "process", "pid",
            "tag", "input", "stdin", "pty", "size", "cols", "rows", "signal", "cwd", "envs", "args",
            "start", "data", "source_paths", "username",
        )  # fmt: skip
        chosen = self.random.sample(fields, self.random.randrange(6))
        return {name: self.value(depth) for name in chosen}

    def body(self) -> bytes:
        text = json.dumps(self.message()).encode()
        kind = self.random.randrange(6)
        if kind == 0:
            return self.random.randbytes(self.random.randrange(300))
        if kind == 1:
            return text[: self.random.randrange(len(text) + 1)]
        if kind == 2:  # an envelope, whole
            return struct.pack(">BI", self.random.choice((0, 0, 0, 1, 2, 255)), len(text)) + text
        if kind == 3:  # one that promises something else
            return struct.pack(">BI", 0, self.random.choice((0, 1, 2**26, 2**32 - 1))) + text
        if kind == 4:
            return b"[" * self.random.randrange(100_000)
        return text

    def request(self) -> bytes:
        if self.random.randrange(12) == 0:
            return self.random.randbytes(self.random.randrange(400))
        body = self.body()
        method = self.random.choice(
            ("GET", "POST", "POST", "POST", "PUT", "DELETE", "\xff", "G" * 9000)
        )
        query = self.random.choice(
            ("", "?path=", "?path=%00", f"?path={self.folder}/q", "?%", "?port=1", "?=&&=&")
        )
        kind = self.random.choice((
            "application/json", "application/connect+json", "application/octet-stream",
            "multipart/form-data; boundary=b", "multipart/form-data", "\x01",
        ))  # fmt: skip
        lines = [
            f"{method} {self.random.choice(ROUTES)}{query} HTTP/1.1", "Host: x", f"Content-Type: {kind}",
            self.random.choice((f"Content-Length: {len(body)}", "Content-Length: 9999999", "Content-Length: -1", "Transfer-Encoding: chunked")),
            self.random.choice(("X: y", "Range: bytes=-", "Connect-Timeout-Ms: 99999999999999999999", "Authorization: Basic !", "Content-Encoding: gzip", "Upgrade: tcp\r\nConnection: upgrade", "X-Metadata-: 1")),
        ]  # fmt: skip
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def send(agent, data: bytes) -> None:
    """One connection: everything at once, then our end of it; what comes back is read away."""
    with agent.connect() as connection:
        connection.settimeout(5)
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except OSError:
            return  # refused in the middle, or a stream that goes on: either is an answer


@pytest.mark.parametrize("part", range(3))
def test_the_agent_outlives_any_input(agent, tmp_path, part):
    source = Source(str(tmp_path))
    source.random.seed(SEED + part)
    for number in range(CONNECTIONS // 3):
        data = source.request()
        send(agent, data)
        if number % 50 == 0:
            assert agent.http.get("/health").status_code == 204, data
    assert agent.http.get("/health").status_code == 204
    for process in agent.call("process.Process/List").json()["processes"]:
        selector = {"process": {"pid": process["pid"]}, "signal": 9}
        agent.call("process.Process/SendSignal", selector)
    assert agent.rss() < 160 << 20


def test_slow_and_silent_clients_do_not_keep_others_waiting(agent):
    held = [agent.connect() for _ in range(300)]
    try:
        for connection in held:
            connection.sendall(
                b"POST /files?path=/nowhere/x HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nx"
            )
        assert agent.call("filesystem.Filesystem/Stat", {"path": "/"}).status_code == 200
    finally:
        for connection in held:
            connection.close()
