"""`make demo`: the main job from nothing to nothing, with times.

A server with a home of its own, an image from Debian packages (no container registry needed), a
sandbox driven by the official E2B SDK, a web server in it reached through the proxy; a template
with a process that counts, paused, resumed, saved and copied; another sandbox by the CLI: a
terminal, a copy, a WebSocket, a forwarded port; a second node that starts the image from the store
with an empty cache; at the end everything is taken down and what is left is counted.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools import demo_guest
from websockets.sync.client import connect

from agentenv.config import load

ROOT = Path(__file__).parents[1]
AENV = ROOT / ".venv" / "bin" / "aenv"
SDK_PYTHON = ROOT / ".cache" / "venvs" / "e2b-current" / "bin" / "python"
IMAGE = "debootstrap:bookworm+python3,procps"
SERVER_DEADLINE = 60.0
HOMES = ("home", "other")


@contextmanager
def told(what: str) -> Iterator[None]:
    print(f"· {what} ...", flush=True)
    begun = time.monotonic()
    yield
    print(f"  done in {time.monotonic() - begun:.2f} s", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(home: Path, port: int, store: Path | None = None) -> Iterator[dict[str, str]]:
    """`aenv serve`, ended and taken down whatever happens; yields the environment of clients."""
    environ = {**os.environ, "AENV_HOME": str(home), "AENV_URL": f"http://127.0.0.1:{port}"}
    environ |= {"AENV_STORE": str(store)} if store else {}
    log = home.with_suffix(".log")
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [AENV, "serve", "--home", home, "--listen", f"127.0.0.1:{port}"],
            stdout=sink,
            stderr=sink,
            env=environ,
            start_new_session=True,
        )
    try:
        with told(f"aenv serve --home {home} --listen 127.0.0.1:{port}"):
            deadline = time.monotonic() + SERVER_DEADLINE
            while not accepts(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.05)
        yield environ
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        subprocess.run([AENV, "down"], env=environ, check=True, stdout=subprocess.DEVNULL)
        log.unlink()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def aenv(environ: dict[str, str], *words: str) -> str:
    print(f"  $ aenv {' '.join(words)}", flush=True)
    done = subprocess.run(
        [AENV, *words], env=environ, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def tour(environ: dict[str, str], home: Path) -> None:
    with told(f"image from Debian packages: {IMAGE}"):
        image = json.loads(aenv(environ, "image", "pull", IMAGE, "--name", "base").splitlines()[-1])
        print(f"  {image['reference']}: {image['size'] / 1e6:.0f} MB as EROFS layers")
    with told("one command in a sandbox of its own"):
        print("  " + aenv(environ, "run", "base", "--", "uname", "-sr"))
    key = (home / "secrets" / "api-key").read_text().strip()
    sdk = {
        **environ,
        "E2B_API_KEY": key,
        "E2B_API_URL": environ["AENV_URL"],
        "E2B_SANDBOX_URL": environ["AENV_URL"],
    }
    with told("the official E2B SDK, unmodified"):
        subprocess.run([SDK_PYTHON, ROOT / "tools" / "demo_sdk.py"], env=sdk, check=True)
    with told("a template by steps, pause, resume, snapshot, fork, by the same SDK"):
        subprocess.run([SDK_PYTHON, ROOT / "tools" / "demo_suspend.py"], env=sdk, check=True)
    live(environ)


@contextmanager
def running(words: list[str | Path], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A verb that goes on until Ctrl-C, ended by one."""
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def live(environ: dict[str, str]) -> None:
    """What one does with a sandbox that runs on."""
    sandbox = aenv(environ, "start", "base", "--timeout", "600")
    with told("a terminal in it: aenv shell"):
        print(f"  {shell(environ, sandbox)}")
    with told("a file into it, a server from it, a WebSocket to it"):
        aenv(environ, "cp", str(ROOT / "tools" / "demo_guest.py"), f"{sandbox}:/srv/")
        serve = [AENV, "exec", sandbox, "--", "python3", "/srv/demo_guest.py"]
        with running(serve, environ) as server:
            assert server.stdout and server.stdout.readline() == "listening\n"
            url = environ["AENV_URL"].replace("http", "ws", 1)
            names = {"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": str(demo_guest.PORT)}
            with connect(url, additional_headers=names, proxy=None) as socket:
                socket.send("through the data plane")
                print(f"  WebSocket: {socket.recv()!r}")
    with told("a port of its loopback on ours: aenv port"):
        echo = (
            "import socket as s; c = s.create_server(('127.0.0.1', 5432)).accept()[0]; "
            "c.sendall(c.recv(99)[::-1])"
        )
        words = [AENV, "exec", sandbox, "--", "sh", "-c", f'echo up; exec python3 -c "{echo}"']
        with running(words, environ) as server:
            assert server.stdout and server.stdout.readline() == "up\n"
            with running([AENV, "port", sandbox, "0:5432"], environ) as forwarding:
                assert forwarding.stdout
                host, _, port = forwarding.stdout.readline().strip().rpartition(":")
                print(f"  {host}:{port} -> port 5432: {asked(host, int(port), b'tpircstsop')!r}")
    with told("what it used"):
        used = json.loads(aenv(environ, "metrics", sandbox))[-1]
        print(
            f"  {used['memUsed'] >> 20} of {used['memTotal'] >> 20} MiB, CPU {used['cpuUsedPct']} %"
        )
    aenv(environ, "kill", sandbox)


def second_node(environ: dict[str, str]) -> None:
    """A node that has nothing but the store starts the image by reading what it touches."""
    with told("the same image on a node with an empty cache"):
        [image] = json.loads(aenv(environ, "image", "ls", "--store"))
        aenv(environ, "image", "pull", f"store:{image['id']}", "--name", "base")
        print("  " + aenv(environ, "run", "base", "--", "python3", "-c", "print(6 * 7)"))
    found = json.loads(aenv(environ, "store", "stats"))
    fetched, size, stored = (
        count / 1e6 for count in (found["fetched_bytes"], image["size"], found["stored_bytes"])
    )
    print(f"  {fetched:.1f} MB fetched of {size:.0f} MB ({100 * fetched / size:.0f} %)")
    print(f"  in {found['requests']} requests; the store holds {stored:.0f} MB")


def asked(host: str, port: int, data: bytes) -> str:
    """The answer of a server that may only just be starting."""
    deadline = time.monotonic() + SERVER_DEADLINE
    while time.monotonic() < deadline:
        with socket.create_connection((host, port), timeout=30) as connection:
            connection.sendall(data)
            if answer := connection.recv(99):
                return answer.decode()
    sys.exit(f"nothing answers at {host}:{port}")


def shell(environ: dict[str, str], sandbox: str) -> str:
    """Type into `aenv shell`; what it said, and its exit code."""
    main, terminal = pty.openpty()
    words = [AENV, "shell", sandbox]
    process = subprocess.Popen(words, env=environ, stdin=terminal, stdout=terminal)
    os.close(terminal)
    os.write(main, b"echo six times seven is $((6 * 7)); exit 5\n")
    said = b""
    try:
        while piece := os.read(main, 65536):
            said += piece
    except OSError:  # EIO: the shell has let go of its terminal
        pass
    os.close(main)
    line = next(line for line in said.decode().splitlines() if line.endswith("is 42"))
    return f"{line!r}, exit code {process.wait(60)}"


def leftovers(parent: Path) -> list[str]:
    runtimes = [load({"home": parent / name}, {}).runtime_dir for name in HOMES]
    found = [str(path) for path in (parent, *runtimes) if path.exists()]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(parent) in text and "tools.demo" not in text:
            found.append(text)
    return found


def main() -> None:
    begun = time.monotonic()
    parent = Path(tempfile.mkdtemp(prefix="aenv-demo-", dir="/var/tmp"))
    parent.chmod(0o711)  # engines run as users of their own and pass through
    home, other = (parent / name for name in HOMES)
    home.mkdir()
    try:
        with server(home, free_port()) as environ:
            tour(environ, home)
        with server(other, free_port(), store=home / "store") as environ:
            second_node(environ)
    finally:
        shutil.rmtree(parent)
    if left := leftovers(parent):
        sys.exit("left behind:\n" + "\n".join(left))
    print(f"Done in {time.monotonic() - begun:.1f} s; nothing is left behind.")


if __name__ == "__main__":
    main()
