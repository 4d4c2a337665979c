"""A real server for tests: `aenv serve` with a home of its own, killed and restarted at will."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.leaks import nothing_left

ROOT = Path(__file__).parents[1]
AENV = (str(Path(sys.executable).with_name("aenv")),)
KEPT = ("AENV_TOOLS", "AENV_BIN_DIR")  # of the suite's own environment
BASE_IMAGE = "debootstrap:bookworm+python3,procps,sudo"
START_DEADLINE = 60.0


def built(name: str) -> Path:
    """One of our Rust programs."""
    folders = [os.environ.get("AENV_BIN_DIR"), ROOT / "target/release", "/opt/agentenv/bin"]
    for folder in filter(None, folders):
        if (path := Path(folder) / name).exists():
            return path
    raise AssertionError(f"{name} is not built; run: make build")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class TestServer:
    """Owns one home and at most one server process; `close` leaves nothing of either."""

    home: Path
    port: int = field(default_factory=free_port)
    environ: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    authority: Path | None = None
    """Trusted for TLS, which the server then speaks."""

    __test__ = False

    @property
    def engine(self) -> str:
        return self.environ["AENV_ENGINE"]

    @property
    def url(self) -> str:
        return f"{'https' if self.authority else 'http'}://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return (self.home / "secrets" / "api-key").read_text().strip()

    @property
    def log(self) -> Path:
        return self.home.with_name(self.home.name + ".log")

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*AENV, "serve", "--home", self.home, "--listen", f"127.0.0.1:{self.port}"],
                stdout=log,
                stderr=log,
                env=self._env(),
                start_new_session=True,
            )
        deadline = time.monotonic() + START_DEADLINE
        while not self.answers():
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"no answer:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def answers(self) -> bool:
        try:
            return self._ask("GET", "/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """As a crash would: no chance to clean up."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)

    def close(self) -> None:
        self.stop()
        self.cli("down", check=True)
        shutil.rmtree(self.home)

    def cli(self, *words: str, check: bool = False, stdin: bytes = b"", timeout: float = 300):
        done = subprocess.run(
            [*AENV, *words],
            input=stdin,
            capture_output=True,
            env={**self._env(), "AENV_HOME": str(self.home), "AENV_URL": self.url},
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, done.stderr.decode()
        return done

    def api(self, method: str, path: str, **options) -> httpx.Response:
        headers = {"X-API-Key": self.key, **options.pop("headers", {})}
        return self._ask(method, path, headers=headers, timeout=300, **options)

    def _ask(self, method: str, path: str, **options) -> httpx.Response:
        verify = ssl.create_default_context(cafile=self.authority) if self.authority else False
        return httpx.request(method, self.url + path, trust_env=False, verify=verify, **options)

    def create(self, template: str = "base", **fields) -> dict:
        answer = self.api("POST", "/v2/sandboxes", json={"templateID": template, **fields})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def sdk_environment(self) -> dict[str, str]:
        """What the official SDKs read."""
        return {
            "PATH": os.environ["PATH"],
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.url,
            "E2B_API_KEY": self.key,
        }

    def hold(self, steps: int, *words: str | Path) -> None:
        """Run a program that drives an official SDK and says `held` after each of its steps."""
        done = subprocess.run(
            words, env=self.sdk_environment(), capture_output=True, text=True, timeout=500
        )
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("held ") == steps

    def inspect(self, sandbox_id: str) -> dict:
        return json.loads(self.cli("inspect", sandbox_id, check=True).stdout)

    def _env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("AENV_")}
        kept |= {k: v for k, v in os.environ.items() if k in KEPT}
        return {**kept, **self.environ}


@contextmanager
def with_base(parent: Path):
    """A server with a home of its own below ``parent`` and the image `base` in it; not started."""
    made = TestServer(new_home(parent))
    made.home.mkdir(mode=0o711)
    try:
        made.cli("image", "pull", BASE_IMAGE, "--name", "base", check=True, timeout=1800)
        yield made
    finally:
        shutil.rmtree(made.home)


@contextmanager
def serving_copy(parent: Path, of: TestServer, **environ: str):
    """A server of the suite's own, to kill and fill, on a copy of another's images, with its
    engine unless another is asked for."""
    running = TestServer(new_home(parent), environ={**of.environ, **environ})
    # The cache is sparse, its copy would not be, and layers of memory are large.
    unwanted = shutil.ignore_patterns("sandboxes", "snapshots", "cache", "*.lock")
    shutil.copytree(of.home, running.home, ignore=unwanted)
    with nothing_left(running.home):
        running.start()
        try:
            yield running
        finally:
            running.close()


def new_home(parent: Path) -> Path:
    """A short path: unix sockets and logs of failures are read by people."""
    return parent / f"h{secrets.token_hex(3)}"
