"""A sandbox of a snapshot, as suspension's own tests have it, and what keeps a diary in it."""

import httpx
import pytest
from tests.integration.suspend.conftest import counting, guest, guest_of
from tests.waiting import until

__all__ = ["counting", "diary", "guest", "guest_of", "stranger"]

# Every line is a moment of wall clock at which user code ran, and what the kernel drew for it.
DIARY = """
import os, time
with open("/srv/diary", "w", buffering=1) as diary:
    while True:
        print(time.time(), os.urandom(8).hex(), file=diary)
        time.sleep(0.01)
"""

# Port 7000 holds whoever comes. A line in /srv/fates tells how each of them ended; `inside` is a
# connection of the guest with itself, which answers when /srv/ask is there.
HOLDER = """
import os, socket, threading, time
def hold(name, peer):
    try:
        while peer.recv(4096):
            if name == "inside":
                note("inside lives")
        note(name + " closed")
    except OSError as error:
        note(name + " " + type(error).__name__)
def note(line):
    with open("/srv/fates", "a") as fates:
        fates.write(line + chr(10))
server = socket.create_server(("0.0.0.0", 7000))
own = socket.create_connection(("127.0.0.1", 7000))
threading.Thread(target=hold, args=("inside", server.accept()[0])).start()
note("ready")
threading.Thread(target=hold, args=("outside", server.accept()[0])).start()
note("held")
while not os.path.exists("/srv/ask"):
    time.sleep(0.01)
own.sendall(b"x")
time.sleep(3600)
"""


class Diary:
    """Kept by a process of a guest from now on."""

    def __init__(self, keeper):
        self.guest = keeper
        background(keeper, DIARY)
        until(self.read)

    def read(self):
        """Pairs of time and draw. A line may be half written while it is read."""
        lines = self.guest.sh("cat /srv/diary || true").splitlines()
        return [(float(at), drawn) for at, drawn in map(str.split, lines[:-1])]

    def goes_on(self):
        before = len(self.read())
        until(lambda: len(self.read()) > before + 5)
        return self.read()


def background(keeper, program):
    keeper.sh(f"cat > /srv/program.py <<'END'\n{program}\nEND")
    keeper.sh("setsid python3 /srv/program.py > /srv/said 2>&1 < /dev/null &")


@pytest.fixture
def diary(guest):
    return Diary(guest)


@pytest.fixture
def stranger(server, guest):
    """Its port 8080 by way of the data plane, over connections that are kept."""
    headers = {"E2b-Sandbox-Id": guest.id, "E2b-Sandbox-Port": "8080"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client
