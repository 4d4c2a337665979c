"""The record of a sandbox that goes back, and what is left when it cannot."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from agentenv.errors import InfraError
from agentenv.model import Guest, Resources
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.rollback import beside, next_life
from agentenv.sandbox.state import State
from agentenv.snapshot.manifest import Element, Manifest

NOW = datetime(2026, 12, 2, tzinfo=UTC)
INFO = SandboxInfo(
    "s" * 20, State.RUNNING, "tpl", "b", "img", NOW, NOW, Resources(1), Guest(), snapshot_id="later",
    disk_id="latest", slot=3, machine="s.4", generation=4, access_token="tok", from_disk=True,
    network_pending=True, phases={"slot": 1.0}, lifetime=60.0,
)  # fmt: skip
SAVED = Manifest(
    "saved",
    NOW,
    INFO.id,
    None,
    "img",
    Resources(1),
    Guest(),
    {"engine": "gvisor"},
    (Element(1, "a" * 64),),
    None,
)


def test_it_stays_itself_on_a_machine_of_the_next_generation():
    made = next_life(INFO, SAVED)
    assert made.engine == "gvisor"
    for same in ("id", "state", "access_token", "end_at", "lifetime", "started_at", "template_id"):
        assert getattr(made, same) == getattr(INFO, same)
    assert (made.generation, made.snapshot_id, made.disk_id) == (5, "saved", "saved")
    assert (made.slot, made.machine, made.phases) == (None, "", {})
    assert not made.from_disk and not made.network_pending


async def test_without_a_seat_nothing_is_removed():
    async def no_seat(info):
        raise InfraError("no slot", code="no_slots")

    ground = SimpleNamespace(take_seat=no_seat)  # anything else that is asked of it is a fault
    with pytest.raises(InfraError, match="no slot"):
        async with beside(ground, INFO, SAVED, asyncio.Semaphore(1), 1.0):
            pass
