"""Which files differ between sandboxes, snapshots and the image: told by their guests."""

import json

import pytest

pytestmark = pytest.mark.only("qemu")  # gVisor keeps what changed in a form of its own


def diff(server, *words):
    found = json.loads(server.cli("diff", *words, check=True).stdout)
    return {each["path"]: each["change"] for each in found if each["path"].startswith("/srv/t")}


@pytest.fixture
def pair(server, guest, guest_of):
    """A sandbox with a tree, and a fork of it that has changed some."""
    guest.sh("mkdir -p /srv/t/d && cd /srv/t && echo 1 > same && echo 1 > old && echo 1 > d/inner")
    guest.sh("cd /srv/t && echo 1 > content && touch -d @1000 content")
    (made,) = guest.post("fork", 201)
    copy = guest_of(made["sandbox"]["sandboxID"])
    copy.sh("cd /srv/t && rm -r d && mv old new && echo 22 > same2 && chmod 600 same")
    copy.sh("cd /srv/t && echo 2 > content && touch -d @1000 content")
    return guest, copy


CHANGED = {
    "/srv/t/d": "D", "/srv/t/d/inner": "D", "/srv/t/old": "D", "/srv/t/new": "A",
    "/srv/t/same2": "A", "/srv/t/same": "M",
}  # fmt: skip


def test_what_a_fork_changed(server, pair):
    guest, copy = pair
    assert diff(server, guest.id, copy.id) == CHANGED
    assert diff(server, guest.id, guest.id) == {}
    # Written with the size and the time it had: only its content tells.
    assert diff(server, guest.id, copy.id, "--checksum") == {**CHANGED, "/srv/t/content": "M"}
    assert set(diff(server, copy.id, guest.id).values()) == {"A", "D", "M"}
    assert diff(server, copy.id)["/srv/t/new"] == "A"


def test_paused_ones_and_snapshots_are_looked_into_and_left(server, pair):
    guest, copy = pair
    copy.post("snapshots", 201, name="diffed")
    try:
        copy.pause()
        before = {each["sandboxID"] for each in server.api("GET", "/v2/sandboxes").json()}
        assert diff(server, guest.id, copy.id) == CHANGED
        assert diff(server, "diffed", copy.id) == {}
        after = {each["sandboxID"] for each in server.api("GET", "/v2/sandboxes").json()}
        assert copy.state == "paused" and after == before
    finally:
        assert server.api("DELETE", "/templates/diffed").status_code == 204
    done = server.cli("diff", guest.id, "nobody")
    assert done.returncode != 0 and b"neither" in done.stderr and b"Traceback" not in done.stderr


def test_what_the_image_had_is_deleted_or_modified(server, guest):
    guest.sh("rm -r /usr/share/doc/base-files; echo more >> /etc/issue; rm -r /opt; mkdir /opt")
    found = json.loads(server.cli("diff", guest.id, check=True).stdout)
    changes = {each["path"]: each["change"] for each in found}
    assert changes["/usr/share/doc/base-files"] == "D" and changes["/etc/issue"] == "M"
    assert "/usr/share/doc/base-files/copyright" not in changes
    assert not {"/opt", "/etc/hostname", "/etc/machine-id"} & changes.keys()
