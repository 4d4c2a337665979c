"""A real S3 server (versitygw, which set-up builds) for one suite: its own port, folder and keys."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from tests.waiting import until

PROGRAM = Path(os.environ.get("AENV_TOOLS", "/opt/agentenv")) / "s3/bin/s3"


@dataclass
class S3Server:
    """``localhost`` also serves buckets by name: http://BUCKET.localhost:PORT."""

    folder: Path
    port: int
    bucket: str = "objects"
    access_key: str = field(default_factory=lambda: "AK" + secrets.token_hex(9).upper())
    secret_key: str = field(default_factory=lambda: secrets.token_hex(20))
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://localhost:{self.port}"

    @property
    def keys(self) -> dict[str, str]:
        """The environment that a client needs."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def url(self, prefix: str = "", **options: str) -> str:
        """The store's URL; a server that does not answer is given up after ten seconds."""
        known = {"endpoint": self.endpoint, "timeout": "10", **options}
        return f"s3://{self.bucket}/{prefix}?{urlencode(known)}"

    @property
    def files(self) -> Path:
        """Where the server lays the objects of the bucket, each under its key."""
        return self.folder / self.bucket

    def start(self) -> None:
        environment = os.environ | {
            "ROOT_ACCESS_KEY": self.access_key,
            "ROOT_SECRET_KEY": self.secret_key,
        }
        with (self.folder.parent / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, f"127.0.0.1:{self.port}", f"localhost:{self.port}", str(self.folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder.parent / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@asynccontextmanager
async def s3_server(folder: Path | None = None) -> AsyncGenerator[S3Server]:
    """A server with one empty bucket, over ``folder`` if the test has one (a small disk, say)."""
    # /var/tmp: the server needs extended attributes, which an older kernel's tmpfs lacks.
    own = Path(tempfile.mkdtemp(prefix="aenv-s3-", dir="/var/tmp"))
    data = folder or own / "data"
    server = S3Server(data, free_port())
    try:
        server.files.mkdir(parents=True)
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(own)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
