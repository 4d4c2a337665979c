"""Verbs about a running sandbox: cp, port, metrics, ls, exec's deadline, completion."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time

import pytest
from tests.server import AENV


@pytest.fixture(scope="module")
def sandbox(server):
    made = server.create("base", timeout=900, metadata={"run": "a b", "kind": "cli"})
    yield made["sandboxID"]
    server.cli("kill", made["sandboxID"], check=True)


def sh(server, sandbox, script):
    return server.cli("exec", sandbox, "--", "sh", "-c", script, check=True).stdout.decode()


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "f").write_bytes(b"content\0")
    (root / "sub" / "tool").write_bytes(b"#!/bin/sh\n")
    (root / "sub" / "tool").chmod(0o4755)
    (root / "link").symlink_to("sub/f")
    with (root / "holes").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"island")
    os.chown(root / "sub" / "f", 1234, 2345)
    os.utime(root / "sub" / "f", (1, 1_400_000_000))
    return root


def test_a_tree_goes_in_and_comes_back(server, sandbox, tree, tmp_path):
    server.cli("cp", str(tree), f"{sandbox}:/tmp/new", check=True)
    facts = sh(
        server,
        sandbox,
        "cd /tmp/new; stat -c '%a %u:%g %Y' sub/f sub/tool; readlink link; stat -c %b holes",
    )
    lines = facts.splitlines()
    assert lines[0] == "644 1234:2345 1400000000" and lines[1].startswith("4755 0:0")
    assert lines[2] == "sub/f"
    keeps_holes = server.engine == "qemu"
    assert (int(lines[3]) < 1000) == keeps_holes
    server.cli("cp", f"{sandbox}:/tmp/new", str(tmp_path / "back"), check=True)
    assert subprocess.run(["diff", "-r", tree, tmp_path / "back"]).returncode == 0
    back = (tmp_path / "back" / "sub" / "f").stat()
    assert (back.st_uid, back.st_gid, back.st_mtime) == (1234, 2345, 1_400_000_000)
    assert ((tmp_path / "back" / "holes").stat().st_blocks < 1000) == keeps_holes
    assert (tmp_path / "back" / "sub" / "tool").stat().st_mode & 0o7777 == 0o755
    server.cli("cp", "--special", f"{sandbox}:/tmp/new/sub/tool", str(tmp_path), check=True)
    assert (tmp_path / "tool").stat().st_mode & 0o7777 == 0o4755


def test_where_copies_land(server, sandbox, tree, tmp_path):
    """As with cp: into a folder that is there, else as the target."""
    sh(server, sandbox, "rm -rf /tmp/land; mkdir /tmp/land")
    server.cli("cp", str(tree / "link"), str(tree / "sub"), f"{sandbox}:/tmp/land", check=True)
    server.cli("cp", str(tree / "sub" / "f"), f"{sandbox}:/tmp/land/g", check=True)
    server.cli(
        "cp", "-u", "nobody", str(tree / "sub" / "f"), f"{sandbox}:/tmp/land/deep/", check=True
    )
    listed = sh(
        server, sandbox, "cd /tmp/land; find . -mindepth 1 | sort; stat -c %U deep/f"
    ).split()
    assert listed == [
        "./deep",
        "./deep/f",
        "./g",
        "./link",
        "./sub",
        "./sub/f",
        "./sub/tool",
        "nobody",
    ]
    (tmp_path / "out").mkdir()
    server.cli(
        "cp",
        f"{sandbox}:/tmp/land/g",
        f"{sandbox}:/tmp/land/sub/f",
        str(tmp_path / "out"),
        check=True,
    )
    assert sorted(os.listdir(tmp_path / "out")) == ["f", "g"]


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (("a", "b"), "one side must be in a sandbox"),
        (("a",), "needs a source and a target"),
        (("/nowhere", "{id}:/tmp"), "does not exist"),
        (("{id}:/nowhere", "."), "does not exist"),
        (("{id}:/etc/passwd", "/nowhere/x"), "no folder /nowhere"),
        (("{id}:/etc", "{id}:/tmp"), "one side must be in a sandbox"),
        (("/etc/hostname", "/etc/passwd", "{id}:/etc/passwd"), "no folder"),
    ],
)
def test_copies_that_cannot_be(server, sandbox, words, needle):
    done = server.cli("cp", *(word.format(id=sandbox) for word in words))
    assert done.returncode not in (0, 70) and needle in done.stderr.decode(), done.stderr
    assert b"Traceback" not in done.stderr


@contextlib.contextmanager
def forwarded(server, sandbox, port):
    environ = {**os.environ, "AENV_HOME": str(server.home), "AENV_URL": server.url}
    process = subprocess.Popen([*AENV, "port", sandbox, port], stdout=subprocess.PIPE, env=environ)
    try:
        host, _, bound = process.stdout.readline().decode().strip().rpartition(":")
        yield host, int(bound)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)
        process.stdout.close()


def test_a_port_on_the_sandboxs_loopback_is_here(server, sandbox):
    """A protocol that is not HTTP, on an address that the data plane does not reach."""
    echo = (
        "import socket; s = socket.create_server(('127.0.0.1', 7000)); print('up', flush=True)\n"
        "while True:\n c = s.accept()[0]\n while d := c.recv(9999): c.sendall(d[::-1])\n c.close()"
    )
    sh(
        server,
        sandbox,
        f"cat > /tmp/echo.py <<'END'\n{echo}\nEND\nsetsid python3 /tmp/echo.py >/tmp/up 2>&1 &",
    )
    deadline = time.monotonic() + 30
    while "up" not in sh(server, sandbox, "cat /tmp/up"):
        assert time.monotonic() < deadline
    with forwarded(server, sandbox, "0:7000") as where:
        for _ in range(3):
            with socket.create_connection(where, timeout=20) as connection:
                connection.sendall(b"abc")
                assert connection.recv(10) == b"cba"
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(10) == b""
    with (
        forwarded(server, sandbox, "0:7999") as where,
        socket.create_connection(where, timeout=20) as refused,
    ):
        assert refused.recv(10) == b""
    assert b"is no port" in server.cli("port", sandbox, "99999").stderr


def test_lists_are_filtered_and_shown_as_asked(server, sandbox):
    def ids(*words):
        return server.cli("ls", "-q", *words, check=True).stdout.decode().split()

    assert ids("-m", "run=a b", "-m", "kind=cli") == [sandbox]
    assert ids("-m", "run=other") == [] and ids("--template", "nothing") == []
    assert sandbox in ids("--state", "running") and ids("--state", "paused") == []
    assert ids("--since", "2999-01-01T00:00:00Z") == []
    assert b"unknown state" in server.cli("ls", "--state", "x").stderr
    table = server.cli("ls", "-o", "table", check=True).stdout.decode()
    assert table.split()[:2] == ["ID", "TEMPLATE"] and sandbox in table
    assert json.loads(server.cli("ls", "--output", "json", check=True).stdout)


def test_metrics_as_samples(server, sandbox):
    deadline = time.monotonic() + 30
    while not (found := json.loads(server.cli("metrics", sandbox, check=True).stdout)):
        assert time.monotonic() < deadline
    assert found[-1]["memTotal"] > found[-1]["memUsed"] > 0
    assert "CPU %" in server.cli("metrics", sandbox, "-o", "table", check=True).stdout.decode()


def test_a_command_is_ended_at_its_deadline(server, sandbox):
    done = server.cli("exec", "--timeout", "1.5", sandbox, "--", "sh", "-c", "echo early; sleep 60")
    assert (done.returncode, done.stdout) == (124, b"early\n")


@pytest.mark.only("qemu")  # a kernel of its own panics
def test_a_sandbox_that_died_is_not_a_command_that_failed(server):
    sandbox = server.create("base", timeout=300)["sandboxID"]
    done = server.cli(
        "exec", sandbox, "-u", "root", "--", "sh", "-c", "echo c > /proc/sysrq-trigger; sleep 60"
    )
    fault = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (done.returncode, fault["code"]) == (69, "guest_died") and "panic" in fault["message"]
    killed = server.create("base", timeout=300)["sandboxID"]
    server.cli("kill", killed, check=True)
    fault = json.loads(server.cli("exec", killed, "true").stderr.splitlines()[-1])["error"]
    assert fault["code"] == "sandbox_not_found" and "killed on request" in fault["message"]


def test_ids_are_completed(server, sandbox):
    environ = {
        **os.environ, "AENV_HOME": str(server.home), "AENV_URL": server.url,
        "_AENV_COMPLETE": "complete_bash", "COMP_WORDS": f"aenv exec {sandbox[:4]}", "COMP_CWORD": "2",
    }  # fmt: skip
    done = subprocess.run([*AENV], capture_output=True, text=True, env=environ)
    assert sandbox in done.stdout.split(), done
