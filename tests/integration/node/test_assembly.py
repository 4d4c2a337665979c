"""A server from start to stop: what it refuses to start on, and that it leaves nothing."""

import os
import socket
import subprocess

import pytest
from tests.leaks import nothing_left
from tests.server import AENV, TestServer, new_home


@pytest.fixture
def home(scratch):
    path = new_home(scratch)
    path.mkdir(mode=0o711)
    return path


def serve(home, *words):
    """`aenv serve` that should not come up."""
    return subprocess.run(
        [*AENV, "serve", "--home", home, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if k != "AENV_HOME"},
    )


def test_a_server_without_sandboxes_leaves_nothing_when_it_is_stopped(home):
    running = TestServer(home)
    with nothing_left(home):
        running.start()
        assert running.api("GET", "/v2/sandboxes").json() == []
        mode = (home / "secrets/api-key").stat().st_mode & 0o777
        assert mode == 0o600 and running.key.startswith("e2b_") and len(running.key) == 44
        running.stop()
    running.close()


def test_two_servers_do_not_share_a_home(home):
    running = TestServer(home)
    running.start()
    done = serve(home, "--listen", "127.0.0.1:0")
    assert done.returncode == 64 and "is running" in done.stderr
    assert running.answers()
    running.close()


def test_a_taken_port_is_told_and_leaves_nothing(home):
    with nothing_left(home), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve(home, "--listen", f"127.0.0.1:{port}")
    assert done.returncode == 71 and str(port) in done.stderr and "Traceback" not in done.stderr


def test_a_home_that_engines_cannot_reach_is_told(scratch):
    closed = scratch / "closed"
    closed.mkdir(mode=0o700)
    done = serve(closed / "home", "--engine", "qemu")
    assert done.returncode == 64 and f"chmod o+x {closed}" in done.stderr


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (("--listen", "nonsense"), "HOST:PORT"),
        (("--listen", "no.such.host.invalid:1"), "no.such.host.invalid"),
        (("--engine", "xen"), "engine"),
    ],
)
def test_bad_options_are_told(home, words, needle):
    done = serve(home, *words)
    assert done.returncode in (64, 71) and needle in done.stderr and "Traceback" not in done.stderr


def test_a_missing_tool_is_named_with_its_remedy(home):
    done = subprocess.run(
        [*AENV, "serve", "--home", home, "--engine", "qemu"],
        capture_output=True,
        text=True,
        env={**os.environ, "AENV_TOOLS": "/nonexistent"},
    )
    assert done.returncode == 71 and "make setup" in done.stderr


def test_down_on_nothing_is_success(home):
    assert subprocess.run([*AENV, "down", "--home", home]).returncode == 0
    assert subprocess.run([*AENV, "down", "--home", home / "none"]).returncode == 0
