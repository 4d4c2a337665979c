"""Everything killed for real: server at each step of a creation, engine, agent, guest."""

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.leaks import HostObjects
from tests.server import serving_copy

from agentenv.host.cgroup import detect

pytestmark = pytest.mark.both


@pytest.fixture(scope="module")
def own(scratch, server):
    """A server of this module's, on a copy of the session's images."""
    with serving_copy(scratch, server) as running:
        yield running


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_killed_server_finds_its_sandboxes_again(own):
    made = own.create("base", timeout=600)["sandboxID"]
    pid = own.inspect(made)["objects"]["pid"]
    end_at = own.api("GET", f"/sandboxes/{made}").json()["endAt"]
    own.cli("exec", made, "--", "sh", "-c", "echo kept > /kept", check=True)
    own.kill()
    assert alive(pid)
    own.start()
    assert own.cli("exec", made, "--", "cat", "/kept", check=True).stdout == b"kept\n"
    assert own.inspect(made)["objects"]["pid"] == pid
    assert own.api("GET", f"/sandboxes/{made}").json()["endAt"] == end_at
    own.cli("kill", made, check=True)
    assert not alive(pid)


def test_a_deadline_that_passed_while_no_server_ran_is_applied(own):
    made = own.create("base", timeout=600)["sandboxID"]
    pid = own.inspect(made)["objects"]["pid"]
    own.api("POST", f"/sandboxes/{made}/timeout", json={"timeout": 1})
    own.kill()
    time.sleep(1.0)  # the deadline itself
    own.start()
    until(lambda: own.inspect(made)["state"] == "ended")
    assert not alive(pid)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15, 0.4, 1.0, 2.0, 3.0])
def test_a_creation_cut_short_by_a_crash_leaves_nothing(own, delay):
    before = HostObjects.now()

    def attempt():
        with contextlib.suppress(httpx.HTTPError):  # the connection breaks: that is the point
            own.api("POST", "/v2/sandboxes", json={"templateID": "base"})

    thread = threading.Thread(target=attempt)
    thread.start()
    time.sleep(delay)  # spreads the kill over the steps
    own.kill()
    own.start()
    thread.join()
    for listed in own.api("GET", "/v2/sandboxes").json():
        own.cli("kill", listed["sandboxID"], check=True)
    left = {
        kind: found
        for kind, found in HostObjects.now().more_than(before, own.home).items()
        if kind not in ("links", "runtime")  # slots are prepared ahead: their number may grow
    }
    assert not left.get("cgroups") and not [p for p in left.get("processes", []) if "qemu" in p], (
        left
    )
    assert not list((own.home / "sandboxes").iterdir())


def test_a_killed_engine_is_reported_as_such(own):
    made = own.create("base", timeout=600)["sandboxID"]
    objects = own.inspect(made)["objects"]
    os.kill(objects["pid"], signal.SIGKILL)
    until(lambda: own.inspect(made)["state"] == "ended")
    assert own.inspect(made)["cause"]["kind"] == "killed"
    assert own.api("GET", f"/sandboxes/{made}").status_code == 404
    assert not Path(objects["run_dir"]).exists() and not Path(objects["files"]).exists()


@pytest.mark.only("qemu")  # a kernel of its own
def test_a_guest_panic_is_reported_with_its_console(own):
    made = own.create("base", timeout=600)["sandboxID"]
    own.cli("exec", made, "-u", "root", "--", "sh", "-c", "echo c > /proc/sysrq-trigger")
    until(lambda: own.inspect(made)["state"] == "ended")
    cause = own.inspect(made)["cause"]
    assert cause["kind"] == "panic", cause
    assert any("panic" in line.lower() for line in cause["console"])


def test_a_killed_agent_comes_back_with_its_token(own):
    made = own.create("base", timeout=600)["sandboxID"]
    script = "pkill -9 -f -o '^/init' ; kill -9 $PPID; true"
    own.cli("exec", made, "-u", "root", "--", "sh", "-c", script)
    until(lambda: own.cli("exec", made, "--", "echo", "back").stdout == b"back\n")
    refused = httpx.get(
        f"{own.url}/files?path=/etc/passwd", headers={"E2b-Sandbox-Id": made}, trust_env=False
    )
    assert refused.status_code == 401
    own.cli("kill", made, check=True)


def test_a_killed_supervisor_and_data_plane_come_back(own):
    made = own.create("base", timeout=600)["sandboxID"]
    for name in ("agentenv.host.supervisor", "agentenv-edge"):
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            if name in text and str(own_runtime(own)) in text:
                os.kill(int(entry.parent.name), signal.SIGKILL)
    own.kill()
    own.start()
    assert own.cli("exec", made, "--", "echo", "here", check=True).stdout == b"here\n"
    own.cli("kill", made, check=True)


def own_runtime(server) -> Path:
    from agentenv.config import load

    return load({"home": server.home}, {}).runtime_dir


@pytest.mark.full
def test_thirty_creates_and_kills_at_once_leave_nothing(own):
    """A third of the callers hang up in the middle, a third kill at once, a third use it first."""
    before = HostObjects.now()

    def life(number):
        if number % 3 == 0:
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(
                    f"{own.url}/v2/sandboxes", json={"templateID": "base", "memoryMB": 256},
                    headers={"X-API-Key": own.key}, timeout=0.5 + number / 10, trust_env=False,
                )  # fmt: skip
            return True
        answer = own.api("POST", "/v2/sandboxes", json={"templateID": "base", "memoryMB": 256})
        if answer.status_code != 201:
            return False
        made = answer.json()["sandboxID"]
        used = number % 3 == 1 or own.cli("exec", made, "--", "echo", "1").stdout == b"1\n"
        return used and own.cli("kill", made).returncode == 0

    with concurrent.futures.ThreadPoolExecutor(30) as pool:
        assert all(pool.map(life, range(30)))
    # What was asked for by callers who hung up exists: a create is not undone by a lost answer.
    until(lambda: not creating(own), 300)
    own.cli("kill", "--all", check=True)
    left = HostObjects.now().more_than(before, own.home)
    assert not left.get("cgroups") and not [p for p in left.get("processes", []) if "qemu" in p]
    assert not list((own.home / "sandboxes").iterdir())


def creating(server):
    return [p for p in (server.home / "sandboxes").iterdir()
            if p.name not in {s["sandboxID"] for s in server.api("GET", "/v2/sandboxes").json()}]  # fmt: skip


@pytest.mark.only("qemu")  # what a command takes is all of gVisor's: tests/integration/gvisor
def test_a_machine_over_its_memory_limit_is_told_from_one_that_was_killed(own):
    made = own.create("base", timeout=600)["sandboxID"]
    objects = own.inspect(made)["objects"]
    layout = detect()
    file = "memory.max" if layout.unified else "memory.limit_in_bytes"
    tag = own_runtime(own).name
    group = layout.roots["memory"] / "agentenv" / tag / objects["cgroup"]
    (group / file).write_text(str(objects["memory_bytes"] + (8 << 20)))
    own.cli("exec", made, "-u", "root", "--", "sh", "-c", "head -c 300000000 /dev/zero | tail -c 1")
    until(lambda: own.inspect(made)["state"] == "ended")
    assert own.inspect(made)["cause"]["kind"] == "out_of_memory", own.inspect(made)["cause"]
