"""Guests that do not answer. What is saved of those that do: tests/integration/suspend."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from agentenv.engine.qemu.engine import TRAITS
from agentenv.errors import GuestError
from agentenv.sandbox import suspend
from agentenv.sandbox.suspend import How

ENGINE = SimpleNamespace(traits=TRAITS)
GROUND = SimpleNamespace(engine=lambda _: ENGINE)
SILENT = GuestError("the agent did not answer", code="guest_unresponsive")


class Control:
    """Answers, or fails at one operation."""

    def __init__(self, fails=None):
        self.fails, self.asked = fails, []

    async def call(self, op, args=None, *, timeout):
        self.asked.append(op)
        if op == self.fails:
            raise SILENT
        return {"frozen": True, "processes": 2}


class Machine:
    def __init__(self):
        self.runs = 0

    async def save(self, plan):
        raise AssertionError("it must not be saved")

    async def go_on(self):
        self.runs += 1


def source(control, machine):
    return suspend.Source(GROUND, SimpleNamespace(engine="qemu"), machine, control)


@pytest.mark.parametrize("how", [How(healthy=True), How(memory=False)])
async def test_a_silent_guest_is_not_saved_where_its_help_is_needed(how):
    control, machine = Control("suspend"), Machine()
    with pytest.raises(GuestError) as caught:
        async with suspend.paused(source(control, machine), how):
            pass
    assert caught.value.code == "sandbox_snapshot_guest_agent_unresponsive"
    assert caught.value.http_status == 409 and control.asked[-1] == "release"


async def test_processes_go_on_when_the_disk_cannot_be_frozen():
    control = Control("freeze")
    with pytest.raises(GuestError):
        async with suspend.paused(source(control, Machine()), How(memory=False)):
            pass
    # It may have been frozen after all, when nobody waited for it any more; a silent guest is left.
    assert control.asked == ["suspend", "freeze", "thaw", "release"]


class Writing(Machine):
    """Writes to one of its disks."""

    def __init__(self, disk=None):
        super().__init__()
        self.disk = disk

    async def writes(self, disk):
        return self.disk == disk


def with_disks(folder, machine, recorded):
    """A sandbox with its disk, and one that a snapshot gave it and did not finish."""
    for name in ("disk.qcow2", "new.next"):
        (folder / name).write_text(name)
    ground = SimpleNamespace(files=lambda _: folder, engine=GROUND.engine)
    info = SimpleNamespace(machine="m", disk_id=recorded, engine="qemu")
    return suspend.Source(ground, info, machine, Control())


async def nobody(manifest):
    raise AssertionError("there is nothing to record")


async def test_a_new_disk_that_the_machine_never_used_goes(tmp_path):
    await suspend.mend(with_disks(tmp_path, Writing(), None), nobody)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["disk.qcow2"]


async def test_a_new_disk_that_was_recorded_takes_its_place(tmp_path):
    machine = Writing(tmp_path / "new.next")
    await suspend.mend(with_disks(tmp_path, machine, "new"), nobody)
    assert [path.name for path in tmp_path.iterdir()] == ["disk.qcow2"]
    assert (tmp_path / "disk.qcow2").read_text() == "new.next"


def test_a_disk_that_is_part_of_memory_is_saved_together_with_it():
    whole = SimpleNamespace(engine=lambda _: SimpleNamespace(traits=replace(TRAITS, layered=False)))
    one = suspend.Source(whole, SimpleNamespace(engine="gvisor"), Machine(), Control())
    assert one.saving(How(memory=False, healthy=True)) == How(memory=True, healthy=True)
    assert source(Control(), Machine()).saving(How(memory=False)) == How(memory=False)
