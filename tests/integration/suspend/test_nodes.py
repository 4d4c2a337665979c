"""A sandbox that was saved on one node goes on on another that shares the store."""

import json

import pytest
from tests.integration.suspend.conftest import Guest
from tests.server import TestServer, new_home
from tests.waiting import until


@pytest.fixture
def other(scratch, server):
    """A second node: nothing of the first is on it."""
    home = new_home(scratch)
    home.mkdir(mode=0o711)
    environ = {**server.environ, "AENV_STORE": str(server.home / "store")}
    running = TestServer(home, environ=environ)
    running.start()
    yield running
    running.close()


def saved_in(server, sandbox_id):
    """The snapshot of a paused sandbox, once the store has it."""
    snapshot = json.loads(server.cli("inspect", sandbox_id, check=True).stdout)["snapshot_id"]
    until(lambda: list((server.home / "store/snapshot").rglob(snapshot)), 90)
    return snapshot


def test_memory_disk_and_processes_go_on_elsewhere(server, guest, other):
    guest.sh("echo saved > /srv/file; echo memory > /dev/shm/memory")
    pid, count = guest.sh("cat /srv/pid"), guest.count()
    guest.pause()
    snapshot = saved_in(server, guest.id)
    made = other.create(snapshot, timeout=900)
    copy = Guest(other, made["sandboxID"])
    assert made["restore"]["identity_fresh"] and copy.id != guest.id
    assert copy.sh("cat /srv/file /dev/shm/memory /srv/pid") == f"saved\nmemory\n{pid}"
    copy.counts_on()
    assert copy.count() > count
    copy.pause()
    copy.resume()
    copy.counts_on()
    assert other.api("DELETE", f"/sandboxes/{copy.id}").status_code == 204
    guest.resume()
    guest.counts_on()
    answer = other.api("POST", "/v2/sandboxes", json={"templateID": "a" * 20})
    assert answer.status_code == 404, answer.text
