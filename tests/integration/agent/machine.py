"""A running guest whose control channel is the test's: the server that booted it is gone.

Its in-guest API is asked from inside the slot's network namespace, as the data plane does.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

from tests.integration.node.world import tool
from tests.server import TestServer, serving_copy
from tests.waiting import until

from agentenv.host import netns
from agentenv.sdk import envelope

PORT = 49983
PATIENCE = 60.0  # seconds for an answer; emulated guests on busy machines are slow
ENTROPY = 64


class Refused(Exception):
    """The agent's fault code."""


class Control:
    """The engine's control socket: one line asks, one answers."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(str(path))
        self._socket.sendall(b"\n")
        self._lines = self._socket.makefile("rb")
        self._numbers = itertools.count(1 << 50)  # the server's came before

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        number = next(self._numbers)
        asked = {"id": number, "op": op, "args": args}
        self._socket.sendall(json.dumps(asked).encode() + b"\n")
        while True:
            reply = json.loads(self._lines.readline())
            if reply["id"] != number:
                continue
            if fault := reply.get("error"):
                raise Refused(fault["code"])
            return reply["ok"]

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@dataclass
class Machine:
    """What was told at its last ``init`` is in ``told``."""

    control: Control
    netns: Path
    address: str
    told: dict[str, Any] = field(default_factory=dict[str, Any])

    def init(self, **changes: Any) -> dict[str, Any]:
        """``init`` as told before but for ``changes``, with this moment's clock and entropy."""
        fresh = {
            "time_ns": time.time_ns(),
            "entropy": base64.b64encode(os.urandom(ENTROPY)).decode(),
        }
        asked = {**self.told, **fresh, **changes}
        done = self.control.call("init", **asked)
        self.told = asked
        return done

    def next_generation(self, **changes: Any) -> dict[str, Any]:
        return self.init(generation=self.told["generation"] + 1, **changes)

    def dial(self, port: int = PORT) -> socket.socket:
        made = netns.inside(self.netns, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        made.settimeout(PATIENCE)
        made.connect((self.address, port))
        return made

    def connection(self) -> HTTPConnection:
        """One that stays open between requests."""
        made = HTTPConnection(self.address, PORT)
        made.sock = self.dial()
        return made

    def headers(self) -> dict[str, str]:
        return {"X-Access-Token": self.told["access_token"]}

    def post(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        """A unary RPC."""
        connection = self.connection()
        try:
            connection.request("POST", f"/{method}", json.dumps(message), self.headers())
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return json.loads(answer.read())
        finally:
            connection.close()

    def follow(self, script: str, **more: Any) -> tuple[HTTPConnection, Iterator[dict[str, Any]]]:
        """Start a process as root; its connection and its messages as they come."""
        connection = self.connection()
        headers = {**self.headers(), "Content-Type": "application/connect+json"}
        headers["Authorization"] = "Basic " + base64.b64encode(b"root:").decode()
        command = {"cmd": "/bin/sh", "args": ["-c", script]}
        body = envelope.encode({"process": command, "stdin": False, **more})
        connection.request("POST", "/process.Process/Start", body, headers)

        def messages() -> Iterator[dict[str, Any]]:
            answer, decoder = connection.getresponse(), envelope.Decoder()
            while data := answer.read1(65536):
                yield from (message for _, message in decoder.feed(data))

        return connection, messages()

    def begin(self, script: str) -> int:
        """Start a process and leave; its pid."""
        connection, messages = self.follow(script)
        pid = next(messages)["event"]["start"]["pid"]
        connection.close()
        return pid

    def run(self, script: str) -> str:
        """The output of a script that ends well."""
        connection, messages = self.follow(script)
        output, code = b"", None
        for message in messages:
            event = message.get("event", {})
            output += base64.b64decode(event.get("data", {}).get("stdout", ""))
            code = event.get("end", {}).get("exitCode", code)
        connection.close()
        assert code == 0, (script, code, output)
        return output.decode()

    def read(self, path: str) -> str:
        """A file's content, by the agent itself: no process is needed."""
        connection = self.connection()
        connection.request("GET", f"/files?path={path}&username=root", headers=self.headers())
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return text if answer.status == 200 else ""

    def grows(self, path: str) -> None:
        """Wait until a counter goes on."""
        before = self.read(path)
        until(lambda: self.read(path) not in ("", before))

    def stands_still(self, path: str) -> bool:
        """Whether a counter that is fast enough to be seen between two questions does not move."""
        before = self.read(path)
        for _ in range(20):
            self.control.call("ping")
        return self.read(path) == before


def network_of(slot: Path, tap: str) -> dict[str, Any]:
    """What the guest was told of its network: the address behind the slot's own."""
    (link,) = json.loads(tool("ip", "-json", "-4", "address", "show", "dev", tap, where=slot))
    (own,) = link["addr_info"]
    gateway = IPv4Interface(f"{own['local']}/{own['prefixlen']}")
    address = IPv4Interface(f"{gateway.ip + 1}/{own['prefixlen']}")
    return {
        "address": str(address),
        "gateway": str(gateway.ip),
        "dns": [str(gateway.ip)],
        "mtu": link["mtu"],
    }


@contextmanager
def unattended(scratch: Path, base: TestServer):
    """A QEMU machine whose server was killed after it had booted it."""
    with serving_copy(scratch, base, AENV_ENGINE="qemu") as own:
        made = own.create("base", timeout=3600)
        found = own.inspect(made["sandboxID"])
        identity = ("exec", made["sandboxID"], "--", "cat", "/etc/machine-id")
        machine_id = own.cli(*identity, check=True).stdout.decode().strip()
        own.kill()
        objects = found["objects"]
        slot = Path(objects["netns"])
        control = Control(Path(objects["run_dir"]) / "control.sock")
        network = network_of(slot, objects["tap"])
        told = {
            "generation": 1,
            "sandbox_id": made["sandboxID"],
            "hostname": made["sandboxID"],
            "machine_id": machine_id,
            "access_token": made["envdAccessToken"],
            "network": network,
        }
        try:
            yield Machine(control, slot, network["address"].partition("/")[0], told)
        finally:
            control.close()
