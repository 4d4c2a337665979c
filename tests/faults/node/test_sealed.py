"""A snapshot cut short after its machine was given a new disk; records that cannot be read."""

import contextlib
import os
import sqlite3
import threading
from pathlib import Path

import httpx
import pytest
from tests.integration.suspend.conftest import COUNTER, Guest
from tests.server import serving_copy
from tests.waiting import until


@pytest.fixture(scope="module")
def own(scratch, server):
    with serving_copy(scratch, server) as running:
        yield running


@pytest.fixture(scope="module")
def guest(own):
    made = Guest(own, own.create("base", timeout=900)["sandboxID"])
    made.sh(COUNTER)
    yield made
    own.api("DELETE", f"/sandboxes/{made.id}")


@contextlib.contextmanager
def locked(own):
    """Nobody else writes to the server's database meanwhile."""
    other = sqlite3.connect(own.home / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def has_open(pid, path):
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(path):
                return True
    return False


def writes_a_new_disk(objects):
    files = list(Path(objects["files"]).glob("*.next"))
    return bool(files) and has_open(objects["pid"], files[0])


def ask(own, path, **body):
    """In a thread: the connection breaks with the server, that is the point."""

    def work():
        with contextlib.suppress(httpx.HTTPError):
            own.api("POST", path, json=body)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.only("qemu")  # of gVisor disk and memory are one
def test_a_disk_that_nobody_recorded_is_found_by_the_next_server(own, guest):
    guest.sh("echo before > /srv/kept; sync")
    objects = guest.inspect()["objects"]
    with locked(own):
        thread = ask(own, f"/sandboxes/{guest.id}/snapshots")
        until(lambda: writes_a_new_disk(objects))
        own.kill()
        thread.join()
    own.start()
    assert not list(Path(objects["files"]).glob("*.next"))
    assert own.api("GET", "/snapshots").json() == []
    guest.counts_on()
    guest.sh("echo after > /srv/later; sync")
    guest.pause()
    guest.resume(memory=False)
    assert guest.sh("cat /srv/kept /srv/later") == "before\nafter"


@pytest.mark.only("qemu")
def test_a_disk_frozen_by_a_server_that_died_is_thawed(own, guest):
    with locked(own):
        thread = ask(own, f"/sandboxes/{guest.id}/pause", memory=False)
        until(lambda: list((own.home / "snapshots").glob("*.qcow2")))
        own.kill()
        thread.join()
    own.start()
    assert guest.state == "running"
    guest.sh("echo thawed > /srv/thawed; sync")
    assert guest.sh("cat /srv/kept /srv/later /srv/thawed") == "before\nafter\nthawed"


@pytest.mark.parametrize("table", ["sandboxes", "snapshots"])
def test_a_sandbox_whose_record_is_damaged_can_be_deleted(own, guest, table):
    made = own.create("base", timeout=900)["sandboxID"]
    assert own.api("POST", f"/sandboxes/{made}/pause", json={}).status_code == 204
    own.kill()
    with sqlite3.connect(own.home / "state.db") as database:
        column = "id" if table == "sandboxes" else "sandbox_id"
        query = f"UPDATE {table} SET doc = '{{\"id\": 7}}' WHERE {column} = ?"
        assert database.execute(query, (made,)).rowcount == 1
    own.start()
    assert guest.sh("echo here") == "here"
    answer = own.api("POST", f"/sandboxes/{made}/resume", json={})
    assert answer.status_code == 503 and "cannot be read" in answer.text
    assert own.api("DELETE", f"/sandboxes/{made}").status_code == 204
    assert own.api("GET", f"/sandboxes/{made}").status_code == 404
    until(lambda: not snapshots_of(own, made))


def snapshots_of(own, sandbox_id):
    with sqlite3.connect(own.home / "state.db") as database:
        query = "SELECT id FROM snapshots WHERE sandbox_id = ?"
        return database.execute(query, (sandbox_id,)).fetchall()
