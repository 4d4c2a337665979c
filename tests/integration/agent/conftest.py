"""The guest agent as an ordinary program: its API without a machine around it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.integration.agent.machine import unattended
from tests.server import built

from agentenv.sdk import envelope

TOKEN = "secret-of-this-sandbox"
START_DEADLINE = 10.0


@dataclass
class Agent:
    """A running agent, asked as SDKs do."""

    process: subprocess.Popen[bytes]
    address: tuple[str, int]
    http: httpx.Client

    def call(self, method: str, message: dict | None = None, **headers) -> httpx.Response:
        """A unary RPC: ``process.Process/List``."""
        return self.http.post(f"/{method}", json=message or {}, headers=headers)

    def stream(self, method: str, message: dict, **headers) -> list[dict]:
        """All messages of a streaming RPC, the end-of-stream one as ``{"end": ...}``."""
        return list(self.follow(method, message, **headers))

    def follow(self, method: str, message: dict, **headers) -> Iterator[dict]:
        headers = {"Content-Type": "application/connect+json", **headers}
        decoder = envelope.Decoder()
        with self.http.stream(
            "POST", f"/{method}", content=envelope.encode(message), headers=headers
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for data in answer.iter_raw():
                for flags, found in decoder.feed(data):
                    yield {"end": found} if flags & envelope.END_OF_STREAM else found

    def run(self, script: str, **headers) -> list[dict]:
        return self.stream("process.Process/Start", start(script), **headers)

    def rss(self) -> int:
        """Resident memory in bytes, at its highest so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)


def start(script: str, **more) -> dict:
    return {"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": False, **more}


def output(messages: list[dict], name: str = "stdout") -> bytes:
    import base64

    pieces = [m["event"]["data"].get(name) for m in messages if "data" in m.get("event", {})]
    return b"".join(base64.b64decode(piece) for piece in pieces if piece)


def ended(messages: list[dict]) -> dict:
    return next(m["event"]["end"] for m in messages if "end" in m.get("event", {}))


@contextlib.contextmanager
def running(*options: str):
    """An agent on a port of its own; it must be alive at the end. Who starts it ignores a signal,
    as `nohup` does."""
    deaf = ("/bin/sh", "-c", "trap '' HUP; exec \"$@\"", "sh")
    process = subprocess.Popen(
        [*deaf, built("agentenv-agent"), "--listen", "127.0.0.1:0", *options],
        stdout=subprocess.PIPE,
    )
    try:
        line = process.stdout.readline().decode()
        port = int(line.rpartition(":")[2])
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
            yield Agent(process, ("127.0.0.1", port), http)
        assert process.poll() is None, "the agent died"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def agent():
    """Without a host to introduce it everything is open."""
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def introduced(tmp_path_factory):
    """Told its token, as a host would."""
    control = tmp_path_factory.mktemp("control") / "s"
    with running("--control", f"unix:{control}") as made:
        deadline = time.monotonic() + START_DEADLINE
        while not control.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with socket.socket(socket.AF_UNIX) as host:
            host.connect(str(control))
            init = {"access_token": TOKEN, "env": {"FROM_HOST": "1"}}
            host.sendall(json.dumps({"id": 1, "op": "init", "args": init}).encode() + b"\n")
            assert "ok" in json.loads(host.makefile().readline())
        yield made


@pytest.fixture(scope="package")
def unattended_machine(scratch, base):
    """A real guest, whose control channel nobody else holds."""
    with unattended(scratch, base) as machine:
        yield machine
