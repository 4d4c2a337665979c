"""Pause and resume: nothing is lost, nothing runs meanwhile, nothing is left behind."""

import hashlib
import random
from pathlib import Path

import httpx
import pytest
from tests.waiting import until

pytestmark = pytest.mark.both


def test_memory_disk_processes_and_identity_come_back(guest):
    before, pid = guest.identity(), guest.sh("cat /srv/pid")
    count = guest.count()
    guest.sh("echo changed > /srv/file; echo kept > /dev/shm/memory")
    guest.pause()
    assert guest.state == "paused"
    answer = guest.resume()
    assert answer["sandboxID"] == guest.id and guest.state == "running"
    assert guest.identity() == before
    assert guest.sh("cat /srv/file /dev/shm/memory") == "changed\nkept"
    assert guest.sh("cat /srv/pid") == pid and guest.sh(f"kill -0 {pid} && echo lives") == "lives"
    assert guest.count() >= count
    guest.counts_on()


def test_a_paused_sandbox_holds_nothing_of_the_machine(guest):
    objects = guest.inspect()["objects"]
    guest.pause()
    assert guest.inspect()["objects"] == {"storage_fault": None}
    for path in ("netns", "run_dir", "files"):
        assert not Path(objects[path]).exists(), path
    assert not Path(f"/proc/{objects['pid']}").exists()


def test_what_does_not_fit_the_state_is_refused(guest):
    guest.post("resume", 409)
    guest.pause()
    guest.post("pause", 409)
    guest.post("snapshots", 409)
    guest.post("fork", 409)
    guest.post("timeout", 409, timeout=10)
    guest.post("resume", 201)
    assert guest.post("connect", 200, timeout=900)["sandboxID"] == guest.id


def test_a_caller_who_hangs_up_changes_nothing(server, guest):
    """What was asked for is done to its end."""

    def ask_and_leave(verb, **body):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                f"{server.url}/sandboxes/{guest.id}/{verb}", json=body, timeout=0.02,
                headers={"X-API-Key": server.key}, trust_env=False,
            )  # fmt: skip

    ask_and_leave("pause")
    until(lambda: guest.state == "paused")
    ask_and_leave("connect", timeout=900)
    until(lambda: guest.state == "running")
    guest.counts_on()


def test_lists_know_it_and_its_end_takes_all_of_it(server, guest):
    guest.pause()
    found = server.api("GET", "/v2/sandboxes?state=paused").json()
    assert guest.id in [each["sandboxID"] for each in found]
    assert guest.id not in [e["sandboxID"] for e in server.api("GET", "/sandboxes").json()]
    assert server.api("DELETE", f"/sandboxes/{guest.id}").status_code == 204
    assert server.api("GET", f"/sandboxes/{guest.id}").status_code == 404


def was_booted(guest):
    """Of what ran and what lay in memory nothing is left."""
    assert guest.sh("ls -A /dev/shm; kill -0 $(cat /srv/pid) 2>&1 || true").endswith(
        "No such process"
    )


def test_from_the_disk_alone(guest):
    guest.sh("echo changed > /srv/file; dd if=/dev/urandom of=/srv/big bs=64k count=64 2>/dev/null")
    digest = guest.sh("sha256sum /srv/big")
    guest.pause(memory=False)
    guest.resume()
    was_booted(guest)
    assert guest.sh("cat /srv/file; sha256sum /srv/big") == f"changed\n{digest}"


def test_a_whole_pause_can_be_booted_from_its_disk(guest):
    guest.sh("echo changed > /srv/file; sync")
    guest.pause()
    guest.resume(memory=False)
    was_booted(guest)
    assert guest.sh("cat /srv/file") == "changed"
    guest.pause()
    guest.resume()
    assert guest.sh("cat /srv/file") == "changed"


def test_a_guest_that_stopped_all_its_processes_is_reached_again(guest):
    """Root's `kill -STOP -1` takes the agent, too."""
    guest.sh("kill -STOP -1")
    guest.pause()
    guest.resume()
    guest.sh("kill -CONT -1")
    guest.counts_on()


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=pytest.mark.full)])
def test_rounds_of_random_writing_lose_nothing(guest, rounds):
    """Each round writes files and memory at random places; all of it is there after each."""
    chance = random.Random(rounds)
    wanted = {}
    guest.sh("mkdir /srv/tree; head -c 8M /dev/zero > /dev/shm/pages")
    memory = bytearray(8 << 20)
    for number in range(rounds):
        script = []
        for _ in range(4):
            name, text = f"f{chance.randrange(12)}", f"{number}-{chance.random()}"
            wanted[name] = text
            script.append(f"echo {text} > /srv/tree/{name}")
            page = chance.randrange(2048)
            mark = f"{chance.random():.16f}".encode()
            memory[page * 4096 : page * 4096 + len(mark)] = mark
            write = f"dd of=/dev/shm/pages bs=4096 seek={page} conv=notrunc 2>/dev/null"
            script.append(f"printf {mark.decode()} | {write}")
        guest.sh("; ".join(script))
        guest.pause()
        guest.resume()
        found = guest.sh("cd /srv/tree; for f in *; do echo $f $(cat $f); done")
        assert dict(line.split() for line in found.splitlines()) == wanted
        digest = hashlib.sha256(memory).hexdigest()
        assert guest.sh("sha256sum /dev/shm/pages").split()[0] == digest
    guest.counts_on()


def test_files_of_the_node_become_layers_and_go(server, guest):
    for _ in range(3):
        guest.pause()
        guest.resume()
    folder = server.home / "snapshots"
    until(lambda: not list(folder.iterdir()), 60)
    guest.counts_on()
    guest.pause()
    until(lambda: not list(folder.iterdir()), 60)
    guest.resume()
    guest.counts_on()
