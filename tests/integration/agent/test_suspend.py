"""A guest held still for a snapshot: its processes, its disk, and the agent that goes on answering."""

from http.client import HTTPException

import pytest
from tests.integration.agent.conftest import ended
from tests.waiting import until

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > {0}.new; mv {0}.new {0}; done"


@pytest.fixture
def machine(unattended_machine):
    """As it was before, whatever a test left."""
    yield unattended_machine
    unattended_machine.control.call("release")
    unattended_machine.control.call("thaw")
    unattended_machine.run("kill -9 $(cat /dev/shm/pids 2>/dev/null) 2>/dev/null; true")


def counting(machine, path: str) -> int:
    pid = machine.begin(f"echo $$ >> /dev/shm/pids; {COUNTER.format(path)}")
    machine.grows(path)
    return pid


def frozen(machine, group: str) -> bool:
    return "frozen 1" in machine.read(f"/sys/fs/cgroup/{group}/cgroup.events")


def test_suspended_processes_stand_still_until_released(machine):
    counting(machine, "/dev/shm/count")
    done = machine.control.call("suspend")
    assert done["frozen"] is True and done["processes"] >= 1
    assert frozen(machine, "agentenv") and machine.stands_still("/dev/shm/count")
    assert machine.control.call("hello")["suspended"] is True
    assert machine.control.call("stats")["mem_total"] > 0
    assert machine.control.call("suspend", deadline_ms=1000)["frozen"] is True
    assert machine.control.call("release")["processes"] >= 1
    assert machine.control.call("release")["processes"] >= 1
    assert machine.control.call("hello")["suspended"] is False
    machine.grows("/dev/shm/count")


def test_a_process_started_meanwhile_begins_after_the_release(machine):
    machine.control.call("suspend")
    connection, messages = machine.follow("echo late")
    assert machine.post("process.Process/List", {})["processes"] == []
    machine.control.call("release")
    assert ended(list(messages))["exitCode"] == 0
    connection.close()


def test_a_suspended_process_can_be_killed(machine):
    connection, messages = machine.follow("sleep 1000")
    pid = next(messages)["event"]["start"]["pid"]
    machine.control.call("suspend")
    machine.post("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9})
    assert ended(list(messages))["status"] == "signal: killed"
    connection.close()


def test_whoever_left_the_groups_is_suspended_as_well(machine):
    """As service managers and container engines do."""
    leave = "echo $$ >> /dev/shm/pids; mkdir -p /sys/fs/cgroup/{0}; echo $$ > /sys/fs/cgroup/{0}/cgroup.procs; {1}"
    machine.begin(leave.format("engine", COUNTER.format("/dev/shm/engine")))
    machine.begin(leave.format(".", COUNTER.format("/dev/shm/stray")))
    for name in ("engine", "stray"):
        machine.grows(f"/dev/shm/{name}")
    assert machine.control.call("suspend")["frozen"] is True
    assert frozen(machine, "engine")
    for name in ("engine", "stray"):
        assert machine.stands_still(f"/dev/shm/{name}")
    machine.control.call("release")
    for name in ("engine", "stray"):
        machine.grows(f"/dev/shm/{name}")


def test_a_frozen_disk_holds_writers_back_until_thawed(machine):
    counting(machine, "/var/tmp/count")
    machine.control.call("freeze")
    machine.control.call("freeze")
    assert machine.stands_still("/var/tmp/count")
    machine.control.call("ping")
    assert machine.control.call("stats")["disk_total"] > 0
    machine.control.call("thaw")
    machine.control.call("thaw")
    machine.grows("/var/tmp/count")


def test_a_disk_is_frozen_under_suspended_writers(machine):
    """The order of a snapshot."""
    counting(machine, "/var/tmp/count")
    assert machine.control.call("suspend")["frozen"] is True
    machine.control.call("freeze")
    machine.control.call("thaw")
    machine.control.call("release")
    machine.grows("/var/tmp/count")


def test_an_agent_that_died_leaves_nothing_stopped(machine):
    counting(machine, "/dev/shm/count")
    counting(machine, "/var/tmp/count")
    machine.control.call("freeze")
    # From outside of the groups that it stops. The writer to the disk cannot stop meanwhile.
    machine.begin(
        "mkdir -p /sys/fs/cgroup/out; echo $$ > /sys/fs/cgroup/out/cgroup.procs;"
        "agent=$PPID; echo 1 > /sys/fs/cgroup/agentenv/cgroup.freeze; kill -9 $agent"
    )
    until(lambda: knows_nothing(machine))
    assert machine.control.call("hello")["initialised"] is True
    for path in ("/dev/shm/count", "/var/tmp/count"):
        machine.grows(path)


def knows_nothing(machine) -> bool:
    """Whether another agent has come up: processes of the former are not its own."""
    try:
        return machine.post("process.Process/List", {})["processes"] == []
    except (OSError, HTTPException):
        return False
