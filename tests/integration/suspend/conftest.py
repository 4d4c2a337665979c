"""A sandbox with a history: files, a counting process, a listener."""

import json
import time

import pytest
from tests.waiting import until

# No program is started for each step: many of these run at once.
COUNTER = """
mkdir -p /srv && echo original > /srv/file && mkfifo /dev/shm/tick && exec 9<> /dev/shm/tick
(n=0; while :; do n=$((n+1)); printf '%08d\n' $n 1<> /srv/count; read -rt 0.05 -u 9; done) \
    > /dev/null 2>&1 &
echo $! > /srv/pid
"""


class Guest:
    """Words with one sandbox."""

    def __init__(self, server, sandbox_id):
        self.server, self.id = server, sandbox_id

    def sh(self, script):
        done = self.server.cli("exec", self.id, "--", "/bin/bash", "-c", script, check=True)
        return done.stdout.decode().strip()

    def post(self, verb, status, **body):
        answer = self.server.api("POST", f"/sandboxes/{self.id}/{verb}", json=body)
        said = self.server.log.read_text()[-3000:] if answer.status_code == 500 else ""
        assert answer.status_code == status, (answer.status_code, answer.text, said)
        return answer.json() if answer.content else None

    def pause(self, **body):
        self.post("pause", 204, **body)

    def resume(self, **body):
        return self.post("connect", 201, timeout=900, **body)

    @property
    def state(self):
        return self.server.api("GET", f"/sandboxes/{self.id}").json()["state"]

    def count(self):
        return int(self.sh("cat /srv/count"))

    def counts_on(self):
        before = self.count()
        until(lambda: self.count() > before)

    def identity(self):
        return self.sh("cat /etc/machine-id /etc/hostname /proc/sys/kernel/random/boot_id").split()

    def clock_is_right(self):
        before = time.time()
        guest = float(self.sh("date +%s.%N"))
        return before - 0.5 <= guest <= time.time() + 0.5

    def inspect(self):
        return json.loads(self.server.cli("inspect", self.id, check=True).stdout)


@pytest.fixture
def guest_of(server):
    """Makes guests that end with the test."""
    made = []

    def take(sandbox_id):
        made.append(sandbox_id)
        return Guest(server, sandbox_id)

    yield take
    for sandbox_id in made:
        server.api("DELETE", f"/sandboxes/{sandbox_id}")


@pytest.fixture(scope="module")
def counting(server):
    """The template `counting`: a snapshot of a sandbox in which a process counts."""
    source = Guest(server, server.create("base", timeout=900)["sandboxID"])
    source.sh(COUNTER)
    until(lambda: source.sh("test -e /srv/count && echo yes || true"))
    source.post("snapshots", 201, name="counting")
    server.api("DELETE", f"/sandboxes/{source.id}")
    yield "counting"
    assert server.api("DELETE", "/templates/counting").status_code == 204


@pytest.fixture
def guest(server, counting, guest_of):
    return guest_of(server.create(counting, timeout=900)["sandboxID"])
