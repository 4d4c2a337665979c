"""`init` of another generation: a guest that a snapshot carried over takes up a life of its own."""

import contextlib
import json
import time
from http.client import IncompleteRead

import pytest
from tests.integration.agent.machine import Refused
from tests.integration.node.world import tool
from tests.waiting import until

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /dev/shm/n; done"
TALKER = """
import socket
listener = socket.create_server(("0.0.0.0", 8000))
inner = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(inner.getsockname())
other, _ = inner.accept()
said = open("/dev/shm/said", "w", buffering=1)
def say(what):
    print(what, file=said)
say("ready")
outer, _ = listener.accept()
say("accepted")
try:
    say(f"read {outer.recv(1)}")
except ConnectionAbortedError:
    say("aborted")
one.sendall(b"x")
say(f"inner {other.recv(1).decode()}")
again, _ = listener.accept()
again.sendall(b"hello")
"""
HOUR_NS = 3600 * 10**9


@pytest.fixture
def machine(unattended_machine):
    return unattended_machine


def status_with(machine, token: str) -> int:
    connection = machine.connection()
    connection.request("GET", "/envs", headers={"X-Access-Token": token})
    status = connection.getresponse().status
    connection.close()
    return status


def is_cut(connection) -> bool:
    with contextlib.suppress(ConnectionError):
        return connection.sock.recv(1) == b""
    return True


def test_a_restored_guest_is_somebody_else(machine):
    machine.run("echo '10.9.8.7 mine' >> /etc/hosts; echo '# mine' >> /etc/resolv.conf")
    old = dict(machine.told)
    machine.control.call("suspend")
    done = machine.init(
        sandbox_id="b" * 20, hostname="b" * 20, access_token="another", machine_id="1" * 32
    )
    assert done["restored"] is True and done["entropy_reseeded"] is True
    assert done["frozen"] is True
    assert abs(done["clock_error_ns"]) < HOUR_NS
    tokens = (old["access_token"], "another")
    assert [status_with(machine, token) for token in tokens] == [401, 200]
    assert machine.run("hostname; cat /etc/hostname").split() == ["b" * 20] * 2
    assert machine.read("/etc/machine-id") == "1" * 32 + "\n"
    hosts = machine.read("/etc/hosts")
    assert "b" * 20 in hosts and old["hostname"] not in hosts and "10.9.8.7 mine" in hosts
    assert "# mine" in machine.read("/etc/resolv.conf")
    assert machine.control.call("hello")["suspended"] is False


def test_the_clock_is_the_hosts(machine):
    for ahead in (HOUR_NS, 0):
        told = time.time_ns() + ahead
        machine.next_generation(time_ns=told)
        assert 0 <= int(machine.run("date +%s%N")) - told < HOUR_NS // 2


def test_processes_go_on_and_the_connections_to_them_do_not(machine):
    _, messages = machine.follow(COUNTER, tag="counter")
    next(messages)
    idle = machine.connection()
    idle.request("GET", "/health")
    idle.getresponse().read()
    assert machine.control.call("suspend")["frozen"] is True
    done = machine.next_generation()
    assert done["connections_dropped"] >= 2 and done["resumed_processes"] >= 1
    assert is_cut(idle)
    with pytest.raises((IncompleteRead, ConnectionError)):
        list(messages)
    machine.grows("/dev/shm/n")
    machine.post("process.Process/SendSignal", {"process": {"tag": "counter"}, "signal": 9})


def test_connections_of_processes_end_unless_both_ends_are_here(machine):
    machine.begin(f"python3 - <<'END'\n{TALKER}\nEND")
    until(lambda: "ready" in machine.read("/dev/shm/said"))
    inherited = machine.dial(8000)
    until(lambda: "accepted" in machine.read("/dev/shm/said"))
    done = machine.next_generation()
    assert done["connections_dropped"] >= 1
    until(lambda: "inner x" in machine.read("/dev/shm/said"))
    assert machine.read("/dev/shm/said").split() == ["ready", "accepted", "aborted", "inner", "x"]
    with machine.dial(8000) as again:  # the listener lives
        assert again.recv(5) == b"hello"
    inherited.close()


def test_a_gateway_with_another_hardware_address_is_found(machine):
    (link,) = json.loads(tool("ip", "-json", "link", "show", "tap0", where=machine.netns))
    for address in ("02:ae:00:00:00:77", link["address"]):
        tool("ip", "link", "set", "tap0", "address", address, where=machine.netns)
        machine.next_generation()
        assert address in machine.read("/proc/net/arp")


def test_the_same_generation_again_changes_nothing_and_an_earlier_one_is_refused(machine):
    idle = machine.connection()
    done = machine.init()
    assert done["restored"] is False and done["connections_dropped"] == 0
    assert done["frozen"] is False
    idle.request("GET", "/health")
    assert idle.getresponse().status == 204
    idle.close()
    machine.next_generation()
    with pytest.raises(Refused, match="stale_generation"):
        machine.init(generation=machine.told["generation"] - 1)
    assert machine.control.call("hello")["generation"] == machine.told["generation"]


def test_without_entropy_nothing_comes_to_life(machine):
    machine.control.call("suspend")
    with pytest.raises(Refused, match="entropy"):
        machine.next_generation(entropy="AAAA")
    assert machine.control.call("hello")["suspended"] is True
    done = machine.next_generation()
    assert done["restored"] is True and done["entropy_reseeded"] is True


def test_a_generation_takes_up_a_disk_that_was_frozen_for_the_last(machine):
    machine.control.call("suspend")
    machine.control.call("freeze")
    machine.next_generation(hostname="c" * 20)
    assert machine.read("/etc/hostname") == "c" * 20 + "\n"
    machine.run("echo written > /var/tmp/written && sync")
