"""A running sandbox goes back to a snapshot of its line, or runs on as if nobody had asked."""

import json

import pytest
from tests.waiting import until


@pytest.fixture
def snapshots(server):
    """Names of templates that go with the test."""
    names = []
    yield names
    for name in names:
        assert server.api("DELETE", f"/templates/{name}").status_code == 204


def machine(guest):
    found = guest.inspect()
    return found["generation"], found["objects"]["pid"], found["objects"]["slot"]


def test_back_to_where_it_came_from_and_to_what_was_saved(server, guest, snapshots):
    token = server.api("GET", f"/sandboxes/{guest.id}").json()["envdAccessToken"]
    identity, pid = guest.identity(), guest.sh("cat /srv/pid")
    guest.sh("echo changed > /srv/file; echo lost > /srv/new")
    first = machine(guest)
    assert guest.post("rollback", 200)["envdAccessToken"] == token
    second = machine(guest)
    assert second[0] == first[0] + 1 and second[1] != first[1]
    assert guest.sh("cat /srv/file; ls /srv/new || true") == "original"
    assert guest.identity() == identity and guest.sh("cat /srv/pid") == pid
    guest.counts_on()
    assert guest.clock_is_right()

    guest.sh("echo saved > /srv/file")
    guest.post("snapshots", 201, name="way:back")
    snapshots.append("way")
    guest.sh("echo after > /srv/file; kill $(cat /srv/pid)")
    done = server.cli("rollback", guest.id, check=True)  # the last one
    assert done.stdout.decode().split() == [guest.id]
    assert guest.sh("cat /srv/file") == "saved"
    guest.counts_on()
    guest.post("rollback", 200, snapshotID="counting")
    assert guest.sh("cat /srv/file") == "original"
    guest.post("rollback", 200, snapshotID="way:back")
    guest.pause()
    guest.resume()
    assert guest.sh("cat /srv/file") == "saved"
    guest.counts_on()


def test_a_fork_goes_back_to_a_snapshot_of_its_source_and_no_stranger_does(
    server, guest, guest_of, counting, snapshots
):
    guest.sh("echo saved > /srv/file")
    guest.post("snapshots", 201, name="source")
    snapshots.append("source")
    (made,) = guest.post("fork", 201)
    copy = guest_of(made["sandbox"]["sandboxID"])
    copy.sh("echo copy > /srv/file")
    before = copy.identity()
    copy.post("rollback", 200, snapshotID="source")
    assert copy.sh("cat /srv/file") == "saved"
    assert copy.identity() == before != guest.identity()
    stranger = guest_of(server.create(counting, timeout=600)["sandboxID"])
    refused = stranger.post("rollback", 409, snapshotID="source")
    assert refused["error_code"] == "other_lineage"
    stranger.post("rollback", 404, snapshotID="nobody")
    stranger.post("rollback", 400, snapshotID="base")
    copy.pause()
    copy.post("rollback", 409)
    booted = guest_of(server.create("base", timeout=600)["sandboxID"])
    assert booted.post("rollback", 409)["error_code"] == "no_snapshot"


def test_if_it_cannot_be_restored_it_runs_on(server, guest, snapshots):
    """What its memory was saved in is damaged: that is seen when it is opened."""
    guest.sh("head -c 2M /dev/urandom > /dev/shm/big")
    folder = server.home / "snapshots"
    until(lambda: not list(folder.iterdir()), 60)  # nothing is stored any more for a second
    guest.post("snapshots", 201, name="broken")
    snapshots.append("broken")
    (runs,) = folder.glob("*.runs")
    sound = runs.read_bytes()
    runs.write_bytes(b"damaged")
    before, count = machine(guest), guest.count()
    refused = guest.post("rollback", 503, snapshotID="broken")
    assert refused["error_code"] == "snapshot_damaged"
    assert machine(guest) == before and guest.state == "running"
    assert guest.count() >= count
    guest.counts_on()
    left = {path.name for path in (server.home / "sandboxes").iterdir()}
    assert not {name for name in left if name.startswith(f"{guest.id}.2")}
    runs.write_bytes(sound)
    guest.post("rollback", 200, snapshotID="broken")
    guest.counts_on()


def test_a_line_is_told_with_what_each_holds_alone(server, guest, guest_of):
    (made,) = guest.post("fork", 201)
    copy = guest_of(made["sandbox"]["sandboxID"])
    copy.sh("head -c 4M /dev/urandom > /dev/shm/own; head -c 3M /dev/urandom > /srv/own; sync")
    copy.pause()

    def lineage(one):
        answer = server.api("GET", f"/sandboxes/{one.id}/lineage")
        assert answer.status_code == 200, answer.text
        return answer.json()

    parent, child = lineage(guest), lineage(copy)
    assert parent["parent"]["kind"] == "snapshot" and parent["parent"]["id"] == "counting:default"
    assert parent["children"] == [{"kind": "sandbox", "id": copy.id, "state": "paused"}]
    assert child["parent"] == {"kind": "sandbox", "id": guest.id, "state": "running"}
    assert [each["id"] for each in child["ancestors"][:2]] == [guest.id, "counting:default"]
    memory, disk = child["own"]["memory_bytes"], child["own"]["disk_bytes"]
    if server.engine == "gvisor":  # which has one for both
        memory, disk = memory - (3 << 20), memory - (4 << 20)
    assert 4 << 20 < memory < 128 << 20
    assert 3 << 20 < disk < 128 << 20
    tree = server.cli("tree", guest.id, "-o", "table", check=True).stdout.decode()
    lines = {word: line for line in tree.splitlines() for word in line.split()}
    assert lines[guest.id].index(guest.id) < lines[copy.id].index(copy.id)
    assert "paused" in lines[copy.id] and "MiB" in lines[copy.id]
    found = json.loads(server.cli("tree", check=True).stdout)
    assert {guest.id, copy.id} <= {each["id"] for each in found}
    assert server.api("DELETE", f"/sandboxes/{guest.id}").status_code == 204
    assert lineage(copy)["parent"] == {"kind": "sandbox", "id": guest.id, "state": "ended"}
    assert server.api("GET", f"/sandboxes/{'a' * 20}/lineage").status_code == 404
