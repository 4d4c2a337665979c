"""Snapshots of running sandboxes and forks: the source goes on, copies share a past and no future."""

from pathlib import Path

import pytest
from tests.waiting import until

pytestmark = pytest.mark.both


def fork(guest, guest_of, count, **body):
    made = guest.post("fork", 201, count=count, **body)
    assert len(made) == count
    return [(each["sandbox"], guest_of(each["sandbox"]["sandboxID"])) for each in made]


def test_forks_are_others_with_the_same_past(guest, guest_of):
    guest.sh("echo before > /srv/file")
    copies = fork(guest, guest_of, 3, timeout=600)
    guest.sh("echo source > /srv/file")
    tokens = {answer["envdAccessToken"] for answer, _ in copies}
    identities = [guest.identity(), *(copy.identity() for _, copy in copies)]
    assert len(tokens) == 3
    assert len({i[0] for i in identities}) == len({i[1] for i in identities}) == 4
    assert len({i[2] for i in identities}) == 1  # one boot
    for number, (_, copy) in enumerate(copies):
        assert copy.sh("cat /srv/file") == "before"
        copy.sh(f"echo copy{number} > /srv/file")
    for number, (_, copy) in enumerate(copies):
        assert copy.sh("cat /srv/file") == f"copy{number}"
        copy.counts_on()
        assert copy.clock_is_right()
    assert guest.sh("cat /srv/file") == "source"
    guest.counts_on()


def test_copies_of_copies_and_their_pauses(guest, guest_of):
    ((_, child),) = fork(guest, guest_of, 1)
    child.sh("echo child > /srv/file")
    child.pause()
    child.resume()
    ((_, grandchild),) = fork(child, guest_of, 1)
    child.sh("echo later > /srv/file")
    assert grandchild.sh("cat /srv/file") == "child"
    grandchild.pause()
    grandchild.resume()
    assert grandchild.sh("cat /srv/file") == "child"
    grandchild.counts_on()


def test_snapshots_have_names_and_tags_and_outlive_their_source(server, guest, guest_of):
    first = guest.post("snapshots", 201, name="saved:one")
    guest.sh("echo second > /srv/file")
    second = guest.post("snapshots", 201, name="saved:two")
    unnamed = guest.post("snapshots", 201)
    assert (first["snapshotID"], second["names"]) == ("saved:one", ["saved:two"])
    assert unnamed["names"] == [] and unnamed["snapshotID"].endswith(":default")

    def listed(query):
        answer = server.api("GET", f"/snapshots?{query}")
        return [each["snapshotID"] for each in answer.json()], answer.headers.get("X-Next-Token")

    newest, more = listed(f"sandboxID={guest.id}&limit=2")
    assert newest == [unnamed["snapshotID"], "saved:two"] and more
    assert listed(f"sandboxID={guest.id}&limit=2&nextToken={more}") == (["saved:one"], None)
    assert listed("name=saved:one")[0] == ["saved:one"] and listed("name=nobody")[0] == []
    server.api("DELETE", f"/sandboxes/{guest.id}")
    copies = [
        guest_of(server.create(each, timeout=600)["sandboxID"])
        for each in ("saved:one", "saved:two", unnamed["snapshotID"])
    ]
    assert [copy.sh("cat /srv/file") for copy in copies] == ["original", "second", "second"]
    for name in ("saved", unnamed["templateID"]):
        assert server.api("DELETE", f"/templates/{name}").status_code == 204
        assert server.api("DELETE", f"/templates/{name}").status_code == 404
    assert server.api("POST", "/v2/sandboxes", json={"templateID": "saved"}).status_code == 404
    copies[0].pause()
    copies[0].resume()
    assert copies[0].sh("cat /srv/file") == "original"


def test_a_second_snapshot_has_the_disk_of_the_first_below(guest, guest_of, server):
    for number in range(3):
        guest.sh(f"echo {number} > /srv/file{number}")
        guest.post("snapshots", 201, name="chain")
    copy = guest_of(server.create("chain", timeout=600)["sandboxID"])
    assert copy.sh("cat /srv/file?") == "0\n1\n2"
    guest.pause()
    guest.resume()
    assert guest.sh("cat /srv/file?") == "0\n1\n2"
    assert server.api("DELETE", "/templates/chain").status_code == 204


def test_bad_requests_are_refused(server, guest):
    for count in (0, 101, "x", None, 1.5):
        guest.post("fork", 400, count=count)
    for name in ("", "Ä", "a/b/c", "x:", ":x"):
        guest.post("snapshots", 400, name=name)
    assert server.api("POST", "/sandboxes/aaaaaaaaaaaaaaaaaaaa/fork", json={}).status_code == 404
    body = {"templateID": "counting", "memoryMB": 1024}
    answer = server.api("POST", "/v2/sandboxes", json=body)
    assert answer.status_code == 400 and "saved with" in answer.json()["message"]


@pytest.mark.parametrize("count", [4, pytest.param(10, marks=pytest.mark.full)])
def test_different_histories_share_the_memory_of_their_template(server, counting, guest_of, count):
    """Each is paused and resumed after work of its own: most of what they map is one page cache."""
    guests = [guest_of(server.create(counting, timeout=900)["sandboxID"]) for _ in range(count)]
    for number, one in enumerate(guests):
        one.sh(f"head -c {number + 1}M /dev/urandom > /dev/shm/own")
        one.pause()
        one.resume()
    shared = own = 0
    for one in guests:
        figures = Path(f"/proc/{one.inspect()['objects']['pid']}/smaps_rollup").read_text()
        sizes = {w[0]: int(w[1]) for w in map(str.split, figures.splitlines()[1:])}
        shared += sizes["Rss:"] - sizes["Pss:"]
        own += sizes["Pss:"]
    assert shared > own / 4, (shared, own)


def test_who_is_asked_for_again_is_waited_for(server, counting, guest_of):
    """A machine that waits is handed out, and another one waits then."""

    def warm():
        return server.api("GET", "/nodes").json()[0]["load"]["warm"]

    guest_of(server.create(counting, timeout=900)["sandboxID"])
    until(lambda: warm()["ready"])
    before = warm()["taken"]
    copy = guest_of(server.create(counting, timeout=900)["sandboxID"])
    assert warm()["taken"] == before + 1
    copy.counts_on()
    until(lambda: warm()["ready"])
