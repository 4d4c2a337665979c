"""Registries to pull from: Debian's real one, and one that misbehaves as it is told."""

from __future__ import annotations

import http.server
import json
import secrets
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tests.server import free_port

USER, PASSWORD = "someone", "secret:with:colons"


@dataclass
class RealRegistry:
    host: str
    process: subprocess.Popen
    auth: tuple[str, str] | None

    def push(self, layout: Path, repository: str, tag: str = "latest") -> None:
        """Push an OCI layout's image by the protocol's single requests."""
        index = json.loads((layout / "index.json").read_text())
        entry = index["manifests"][-1]
        manifest = self.blob(layout, entry["digest"])
        doc = json.loads(manifest)
        with httpx.Client(base_url=f"http://{self.host}/v2/{repository}", auth=self.auth) as client:
            for part in [doc["config"], *doc["layers"]]:
                begun = client.post("/blobs/uploads/")
                begun.raise_for_status()
                client.put(
                    f"{begun.headers['Location']}&digest={part['digest']}",
                    content=self.blob(layout, part["digest"]),
                    headers={"Content-Type": "application/octet-stream"},
                ).raise_for_status()
            client.put(
                f"/manifests/{tag}", content=manifest, headers={"Content-Type": doc["mediaType"]}
            ).raise_for_status()

    @staticmethod
    def blob(layout: Path, digest: str) -> bytes:
        return (layout / "blobs" / digest.replace(":", "/")).read_bytes()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def real(folder: Path, *, auth: bool = False):
    folder.mkdir()
    port = free_port()
    config = folder / "config.yml"
    lines = [
        "version: 0.1",
        "log: {level: error}",
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}",
        f"http: {{addr: '127.0.0.1:{port}', secret: x}}",
    ]
    if auth:
        salt = "$2y$05$" + secrets.token_hex(11)
        script = "print crypt($ARGV[0], $ARGV[1])"
        hashed = subprocess.check_output(["perl", "-e", script, PASSWORD, salt], text=True)
        (folder / "htpasswd").write_text(f"{USER}:{hashed}\n")
        lines.append(f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}")
    config.write_text("\n".join(lines))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield RealRegistry(f"127.0.0.1:{port}", process, (USER, PASSWORD) if auth else None)
    finally:
        process.kill()
        process.wait()


def docker_config(folder: Path, host: str) -> None:
    """Log in as `docker login` would write it."""
    import base64

    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


@dataclass
class FaultyRegistry:
    """Serves one OCI layout as repository ``x``. ``faults`` are consumed one per request of their
    kind (``manifests``, ``blobs``): a status, or ``("cut", bytes)``, or ``("replace", bytes)``."""

    host: str
    layout: Path
    faults: dict[str, list] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path
        self.seen.append((path, request.headers.get("Range")))
        if path.startswith("/token"):
            assert "scope=repository%3Ax%3Apull" in path
            return self._send(request, 200, json.dumps({"token": self.token}).encode())
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            challenge = f'Bearer realm="http://{self.host}/token",service="test",scope="wrong"'
            return self._send(request, 401, b"", {"WWW-Authenticate": challenge})
        kind, name = path.removeprefix("/v2/x/").split("/")
        if kind == "manifests":
            index = json.loads((self.layout / "index.json").read_text())
            name = index["manifests"][-1]["digest"] if not name.startswith("sha256:") else name
        blob = self.layout / "blobs" / name.replace(":", "/")
        if not blob.exists():
            return self._send(request, 404, b"{}")
        return self._faulty(request, kind, blob.read_bytes())

    def _faulty(self, request, kind: str, data: bytes) -> None:
        start = 0
        status = 200
        if (wanted := request.headers.get("Range")) and "no-range" not in self.headers:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            status = 206
        planned = self.faults.get(kind, [])
        fault = planned.pop(0) if planned else None
        if isinstance(fault, int):
            return self._send(request, fault, b"not now", self.headers)
        body = data[start:]
        match fault:
            case ("cut", count):
                return self._send(request, status, body[:count], {"Content-Length": str(len(body))})
            case ("replace", other):
                return self._send(request, status, other)
            case ("stall", count):
                self._send(request, status, body[:count], {"Content-Length": str(len(body))})
                self.stalled.set()
                self.release.wait(60)
                return None
        return self._send(request, status, body)

    @staticmethod
    def _send(request, status, body, headers=None) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)
        request.wfile.flush()


@contextmanager
def faulty(layout: Path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            registry.answer(self)

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry = FaultyRegistry(f"127.0.0.1:{server.server_port}", layout)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield registry
    finally:
        registry.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


__all__ = ["FaultyRegistry", "RealRegistry", "docker_config", "faulty", "real"]
