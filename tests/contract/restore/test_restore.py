"""The restore contract: what a guest is promised before any of its code runs again.

Nothing here knows an engine: whatever `aenv serve` runs sandboxes with must pass.
"""

import socket
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import pytest
from tests.contract.restore.conftest import HOLDER, background
from tests.integration.suspend.conftest import Guest
from tests.waiting import until

pytestmark = pytest.mark.both

TOLERANCE = 0.1  # seconds that its clock may be off
ABSENCE = 2.0
SERVER = (
    "python3 -m http.server 8080 -d /srv > /dev/null 2>&1 & "
    "until : 2> /dev/null < /dev/tcp/127.0.0.1/8080; do :; done"
)


def fork(guest, guest_of, count):
    return [guest_of(each["sandbox"]["sandboxID"]) for each in guest.post("fork", 201, count=count)]


def absent(guest):
    """Pause it, and wait until it has missed something."""
    guest.pause()
    paused = time.time()
    until(lambda: time.time() > paused + ABSENCE)
    return paused


def restored(verdict):
    """What every answer says of a restored sandbox."""
    assert 0 <= verdict["clock_error_ms"] <= TOLERANCE * 1000
    assert verdict["entropy_reseeded"] and verdict["frozen"]
    return verdict


def test_every_answer_has_the_verdict(server, counting, guest, guest_of):
    guest.pause()
    assert not restored(guest.resume()["restore"])["identity_fresh"]
    (copy,) = guest.post("fork", 201)
    guest_of(copy["sandbox"]["sandboxID"])
    assert restored(copy["sandbox"]["restore"])["identity_fresh"]
    made = server.create(counting, timeout=900)
    guest_of(made["sandboxID"])
    assert restored(made["restore"])["identity_fresh"]
    assert not restored(guest.post("rollback", 200)["restore"])["identity_fresh"]


def test_no_code_runs_before_the_clock_is_right(diary):
    paused = absent(diary.guest)
    begun = time.time()
    diary.guest.resume()
    moments = [at for at, _ in diary.goes_on()]
    assert moments == sorted(moments)
    assert not [at for at in moments if paused + TOLERANCE < at < begun - TOLERANCE]
    assert moments[-1] <= time.time() + TOLERANCE


def test_copies_draw_nothing_alike_from_their_first_step(diary, guest_of):
    """Neither those who drew already, nor user space that is seeded now."""
    guest = diary.guest
    copies = fork(guest, guest_of, 2)
    diaries = []
    for one in (guest, *copies):
        past = len(diary.read())
        until(lambda one=one, past=past: int(one.sh("wc -l < /srv/diary")) > past + 5)
        diaries.append([line.split()[1] for line in one.sh("cat /srv/diary").splitlines()[:-1]])
    shared = 0
    while len({each[shared] for each in diaries}) == 1:
        shared += 1
    futures = [set(each[shared:]) for each in diaries]
    assert (
        shared and not futures[0] & futures[1] | futures[1] & futures[2] | futures[0] & futures[2]
    )
    seeded = [one.sh("python3 -c 'import random; print(random.random())'") for one in copies]
    drawn = [one.sh("od -An -N16 -tx8 /dev/urandom") for one in (guest, *copies)]
    assert len(set(seeded)) == 2 and len(set(drawn)) == 3


def test_copies_are_others_and_one_that_comes_back_is_who_it_was(server, guest, guest_of):
    def token(one):
        return server.api("GET", f"/sandboxes/{one.id}").json()["envdAccessToken"]

    before = guest.identity(), token(guest)
    copies = fork(guest, guest_of, 2)
    guest.pause()
    guest.resume()
    assert (guest.identity(), token(guest)) == before
    family = [guest, *copies]
    machines, names, boots = zip(*(one.identity() for one in family), strict=True)
    assert len(set(machines)) == len(set(names)) == len({token(one) for one in family}) == 3
    assert len(set(boots)) == 1  # nobody was booted
    for one in family:
        assert one.sh("hostname") == one.sh("cat /etc/hostname") == one.id
        one.counts_on()


@pytest.mark.parametrize("copy", [False, True])
def test_inherited_connections_end_but_for_those_within(server, guest, guest_of, copy):
    background(guest, HOLDER)
    until(lambda: "ready" in guest.sh("cat /srv/fates || true"))
    request = f"GET / HTTP/1.1\r\nHost: 7000-{guest.id}.localhost\r\n\r\n"
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as outside:
        outside.sendall(request.encode())
        until(lambda: "held" in guest.sh("cat /srv/fates"))
        if copy:
            (guest,) = fork(guest, guest_of, 1)
        else:
            guest.pause()
            guest.resume()
            assert b" 502 " in outside.recv(4096).splitlines()[0]
    until(lambda: "outside" in guest.sh("cat /srv/fates"))
    guest.sh("touch /srv/ask")
    until(lambda: "inside lives" in guest.sh("cat /srv/fates"))
    fates = guest.sh("cat /srv/fates").splitlines()
    assert [line.split()[0] for line in fates] == ["ready", "held", "outside", "inside"]


def test_no_connection_of_the_host_outlives_a_generation(guest, stranger):
    """A kept connection to the machine before would hang, or be answered by nobody."""
    guest.sh(SERVER)
    for change in (None, "resume", "rollback"):
        if change == "resume":
            guest.pause()
            guest.resume()
        elif change == "rollback":
            guest.post("rollback", 200)
        answers = [stranger.get("/file") for _ in range(3)]
        assert [(each.status_code, each.text) for each in answers] == [(200, "original\n")] * 3


def test_time_spent_paused_is_nobodys(server, guest):
    def ends():
        shown = server.api("GET", f"/sandboxes/{guest.id}").json()["endAt"]
        return datetime.fromisoformat(shown) - datetime.now(UTC)

    guest.post("timeout", 204, timeout=300)
    absent(guest)
    guest.post("resume", 201)
    assert timedelta(seconds=270) < ends() <= timedelta(seconds=300)


def test_a_command_goes_on_with_the_time_it_had(guest):
    """Its own timers stand still with it: what it waits for does not pass meanwhile."""
    guest.sh("(sleep 600; echo woken) > /srv/woken 2>&1 & echo $! > /srv/sleeper")
    absent(guest)
    guest.resume()
    assert guest.sh("kill -0 $(cat /srv/sleeper) && cat /srv/woken") == ""


def test_whoever_was_made_from_it_keeps_the_contract_too(server, guest, guest_of):
    guest.post("snapshots", 201, name="contract")
    try:
        made = server.create("contract", timeout=900)
        copy = guest_of(made["sandboxID"])
        restored(made["restore"])
        assert copy.identity()[:2] != guest.identity()[:2]
        assert isinstance(copy, Guest) and copy.clock_is_right()
        copy.pause()
        restored(copy.resume()["restore"])
    finally:
        assert server.api("DELETE", "/templates/contract").status_code == 204
