"""Pause, resume and fork cut short for real: nothing is lost, nothing strange is left."""

import concurrent.futures
import contextlib
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.blocks import MIB, small_disk
from tests.integration.suspend.conftest import COUNTER, Guest
from tests.server import serving_copy
from tests.waiting import until

MOMENTS = [0.3]
MORE = [
    pytest.param(each, marks=pytest.mark.full) for each in (0.0, 0.02, 0.1, 0.2, 0.5, 0.8, 1.5, 3.0)
]


@pytest.fixture(scope="module")
def own(scratch, server):
    """A server of this module's, on a copy of the session's images."""
    with serving_copy(scratch, server) as running:
        yield running


@pytest.fixture(scope="module")
def guest(own):
    """One sandbox in which a process counts, shared by the tests: each leaves it running."""
    guest = Guest(own, own.create("base", timeout=3600, memoryMB=256)["sandboxID"])
    guest.sh(COUNTER)
    until(lambda: guest.sh("test -e /srv/count && echo yes || true"))
    yield guest
    assert own.api("DELETE", f"/sandboxes/{guest.id}").status_code == 204
    until(lambda: not files(own))
    assert not machines(own, guest.id)


def machines(server, sandbox_id):
    """Folders of a sandbox's machines; others wait for sandboxes to come."""
    return list((server.home / "sandboxes").glob(f"{sandbox_id}*"))


def files(server):
    return {path.stem for path in (server.home / "snapshots").iterdir()}


def needed_files(server):
    """Those that a recorded snapshot names."""
    with contextlib.closing(sqlite3.connect(server.home / "state.db")) as db:
        docs = " ".join(doc for (doc,) in db.execute("select doc from snapshots"))
    return {name for name in files(server) if name in docs}


def crash_during(guest, verb, delay, **body):
    """Kill the server ``delay`` seconds into a call, and start it again."""

    def attempt():
        with contextlib.suppress(httpx.HTTPError):  # the connection breaks: that is the point
            guest.server.api("POST", f"/sandboxes/{guest.id}/{verb}", json=body)

    thread = threading.Thread(target=attempt)
    thread.start()
    time.sleep(delay)  # spreads the kill over the steps
    guest.server.kill()
    guest.server.start()
    thread.join()


def is_whole(guest):
    """It runs, or can be resumed; its counter goes on; the home has no strangers."""
    server = guest.server
    if guest.state == "paused":
        guest.resume()
    guest.counts_on()
    assert guest.sh("cat /srv/file") == "original"
    for each in server.api("GET", "/v2/sandboxes").json():
        if each["sandboxID"] != guest.id:  # a copy that was there already
            server.api("DELETE", f"/sandboxes/{each['sandboxID']}")
    until(lambda: files(server) == needed_files(server))
    machine = Path(guest.inspect()["objects"]["files"])  # one that waited has a name of its own
    assert machine.exists()
    until(lambda: set(machines(server, guest.id)) <= {machine})


@pytest.mark.parametrize("delay", MOMENTS + MORE)
def test_a_pause_cut_short(guest, delay):
    crash_during(guest, "pause", delay)
    is_whole(guest)


@pytest.mark.parametrize("delay", MOMENTS + MORE)
def test_a_resume_cut_short(guest, delay):
    count = guest.count()
    guest.pause()
    crash_during(guest, "connect", delay, timeout=3600)
    is_whole(guest)
    assert guest.count() > count


@pytest.mark.parametrize("delay", MOMENTS + MORE)
def test_a_fork_cut_short(guest, delay):
    crash_during(guest, "fork", delay, count=1)
    guest.sh("echo after > /srv/after; sync")
    is_whole(guest)
    guest.pause()
    guest.resume()
    assert guest.sh("cat /srv/after") == "after"  # it lies on the disk that is saved
    is_whole(guest)


def test_a_full_disk_is_told_and_the_sandbox_runs_on(guest):
    server, folder = guest.server, guest.server.home / "snapshots"
    listed = server.api("GET", "/snapshots").json()
    until(lambda: not files(server))  # they became layers
    server.stop()
    folder.rmdir()
    with small_disk(folder, 2 * MIB):
        folder.chmod(0o711)
        server.start()
        answer = server.api("POST", f"/sandboxes/{guest.id}/pause", json={})
        assert answer.status_code == 507, answer.text
        assert guest.state == "running"
        guest.counts_on()
        assert server.api("GET", "/snapshots").json() == listed
        server.stop()
    server.start()
    guest.pause()
    guest.resume()
    is_whole(guest)


def test_a_pause_against_another_an_exec_and_a_kill(own, guest):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        pauses = [
            pool.submit(own.api, "POST", f"/sandboxes/{guest.id}/pause", json={}) for _ in range(2)
        ]
        word = pool.submit(own.cli, "exec", guest.id, "--", "echo", "1")
        assert sorted(each.result().status_code for each in pauses) == [204, 409]
        word.result()  # it was said, or refused: it ends
    is_whole(guest)
    made = own.api("POST", f"/sandboxes/{guest.id}/fork", json={"count": 1}).json()
    copy = made[0]["sandbox"]["sandboxID"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pause = pool.submit(own.api, "POST", f"/sandboxes/{copy}/pause", json={})
        kill = pool.submit(own.api, "DELETE", f"/sandboxes/{copy}")
        assert kill.result().status_code == 204
        assert pause.result().status_code in (204, 404, 409)
    assert own.api("GET", f"/sandboxes/{copy}").status_code == 404
    is_whole(guest)


def test_a_paused_one_of_damaged_files_and_record_can_be_deleted(own):
    made = Guest(own, own.create("base", timeout=600, memoryMB=256)["sandboxID"])
    made.pause()
    own.kill()
    with contextlib.closing(sqlite3.connect(own.home / "state.db")) as db, db:
        ((doc,),) = db.execute("select doc from snapshots where sandbox_id = ?", (made.id,))
        for path in (own.home / "snapshots").glob("*.runs"):
            if path.stem in doc:
                path.write_bytes(b"?")
        db.execute("update snapshots set doc = '{}' where sandbox_id = ?", (made.id,))
    own.start()
    answer = own.api("POST", f"/sandboxes/{made.id}/connect", json={"timeout": 600})
    assert answer.status_code >= 400 and "Traceback" not in answer.text
    assert made.state == "paused"
    assert own.api("DELETE", f"/sandboxes/{made.id}").status_code == 204
    assert own.api("GET", f"/sandboxes/{made.id}").status_code == 404


def test_an_engine_killed_while_it_is_saved(own):
    """Last: the sandbox of this test dies of it, or was saved before."""
    made = own.create("base", timeout=600, memoryMB=256)["sandboxID"]
    pid = own.inspect(made)["objects"]["pid"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pause = pool.submit(own.api, "POST", f"/sandboxes/{made}/pause", json={})
        time.sleep(0.05)  # somewhere in it, or just after
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = pause.result().status_code
    if status == 204:
        assert Guest(own, made).state == "paused"
        assert own.api("DELETE", f"/sandboxes/{made}").status_code == 204
    else:
        until(lambda: own.api("GET", f"/sandboxes/{made}").status_code == 404)
