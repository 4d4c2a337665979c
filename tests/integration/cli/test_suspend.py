"""Verbs that pause, resume, save and copy a sandbox, and the same by the synchronous SDK."""

import json

import pytest

from agentenv.errors import Conflict
from agentenv.sdk.sync import AgentEnv


@pytest.fixture(scope="module")
def sandbox(server):
    words = ("--timeout", "900", "--auto-pause", "--auto-resume")
    made = server.cli("start", "base", *words, check=True).stdout.decode().strip()
    sh(server, made, "echo first > /srv/file; echo kept > /dev/shm/memory")
    yield made
    server.cli("kill", made, check=True)


def sh(server, sandbox, script):
    done = server.cli("exec", sandbox, "--", "sh", "-c", script, check=True)
    return done.stdout.decode().strip()


def test_pause_and_resume(server, sandbox):
    def state():
        found = json.loads(server.cli("ls", "-o", "json", check=True).stdout)
        return {each["sandboxID"]: each["state"] for each in found}[sandbox]

    assert server.cli("pause", sandbox, check=True).stdout.decode().split() == [sandbox]
    assert state() == "paused"
    assert "paused" in server.cli("ls", "-o", "table", check=True).stdout.decode()
    again = server.cli("pause", sandbox)
    assert again.returncode == 64 and b"is paused" in again.stderr
    done = server.cli("resume", "a" * 20, sandbox, "--timeout", "900")
    assert done.returncode == 64 and b"not found" in done.stderr
    assert done.stdout.decode().split() == [sandbox] and state() == "running"
    assert sh(server, sandbox, "cat /srv/file /dev/shm/memory") == "first\nkept"
    server.cli("resume", sandbox, check=True)  # already so is success


def test_snapshots_are_made_listed_started_and_removed(server, sandbox):
    assert server.cli("snapshot", sandbox, "--name", "mine:one").stdout == b"mine:one\n"
    found = json.loads(server.cli("snapshots", "--sandbox", sandbox, check=True).stdout)
    assert [each["snapshotID"] for each in found] == ["mine:one"]
    assert json.loads(server.cli("snapshots", "--name", "mine:two", check=True).stdout) == []
    sh(server, sandbox, "echo second > /srv/file")
    copy = server.cli("start", "mine:one", check=True).stdout.decode().strip()
    try:
        assert sh(server, copy, "cat /srv/file") == "first"
    finally:
        server.cli("kill", copy, check=True)
    assert server.cli("snapshots", "rm", "mine:one", check=True).stdout == b"mine:one\n"
    assert server.cli("snapshots", "rm", "mine:one").returncode == 64


def test_forks_are_printed_one_a_line(server, sandbox):
    copies = server.cli("fork", sandbox, "-n", "2", check=True).stdout.decode().split()
    try:
        assert len({sandbox, *copies}) == 3
        assert [sh(server, copy, "cat /dev/shm/memory") for copy in copies] == ["kept"] * 2
    finally:
        server.cli("kill", *copies, check=True)


def test_the_deadline_is_chosen_at_the_start(server, sandbox):
    shown = server.api("GET", f"/sandboxes/{sandbox}").json()["lifecycle"]
    assert shown == {"autoResume": True, "onTimeout": "pause"}
    alone = server.cli("start", "base", "--disk-only")
    assert alone.returncode == 64 and b"needs autoPause" in alone.stderr


def test_the_sdk_without_await(server, sandbox):
    with AgentEnv(server.url, server.key) as env:
        one = env.open(sandbox)
        one.pause()
        with pytest.raises(Conflict):
            one.fork()
        assert one.resume(900)
        (copy,) = one.fork(timeout=300)
        with copy:
            assert copy.commands.run("cat /dev/shm/memory").text.strip() == "kept"
