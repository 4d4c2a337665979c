import asyncio
import base64
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentenv.engine.contract import Attachment, ExitCause, ExitKind
from agentenv.errors import GuestError
from agentenv.model import Guest, Resources, new_id
from agentenv.sandbox import agent
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import State

NOW = datetime(2026, 1, 1, tzinfo=UTC)
INFO = SandboxInfo(
    "abcd" * 5, State.CREATING, "t", "b", "i", NOW, NOW, Resources(1),
    Guest({"A": "b"}, "user", "/w", ("/data",)), access_token="secret",
)  # fmt: skip
NET = Attachment(Path("/ns"), "tap0", "m", "10.0.0.2/30", "10.0.0.1", ("10.0.0.1",))


class Machine:
    def __init__(self, cause=None):
        self._cause = cause

    async def wait(self):
        if self._cause is None:
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)  # a cause is known a moment after the channel broke
        return self._cause

    def console_tail(self, lines=40):
        return ("last words",)


class Control:
    def __init__(self, answer):
        self._answer = answer

    async def call(self, op, args=None, *, timeout):
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


BROKEN = GuestError("the control channel to the guest broke off", code="guest_unresponsive")


def test_what_a_guest_is_told_of_itself():
    told = agent.init_arguments(INFO, NET, 123)
    assert told["sandbox_id"] == told["hostname"] == INFO.id
    assert told["env"] == {"A": "b", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": INFO.id}
    assert told["network"] == {"address": "10.0.0.2/30", "gateway": "10.0.0.1",
                               "dns": ("10.0.0.1",), "mtu": 1500}  # fmt: skip
    assert (told["default_user"], told["default_workdir"]) == ("user", "/w")
    assert told["volumes"] == ["/data"] and told["time_ns"] == 123


def test_no_two_guests_are_given_the_same_entropy_or_identity():
    infos = (INFO, INFO.with_(id=new_id()))
    one, other = (agent.init_arguments(info, None, 0) for info in infos)
    assert one["entropy"] != other["entropy"] and one["machine_id"] != other["machine_id"]
    again = agent.init_arguments(INFO, None, 0)  # after a pause: the same machine, other bytes
    assert again["machine_id"] == one["machine_id"] and again["entropy"] != one["entropy"]
    assert len(base64.b64decode(one["entropy"])) == agent.ENTROPY_BYTES


async def test_the_first_hello_is_returned():
    assert await agent.first_hello(Machine(), Control({"version": "1"}), 5) == {"version": "1"}


async def test_a_machine_that_ends_is_told_with_its_cause():
    machine = Machine(ExitCause(ExitKind.PANIC, "the guest's kernel panicked", 0, ("boom",)))
    with pytest.raises(GuestError) as caught:
        await agent.first_hello(machine, Control(BROKEN), 60)
    assert caught.value.code == "guest_boot_failed"
    assert "panicked" in caught.value.message and caught.value.details["console"] == ["boom"]


async def test_a_silent_guest_is_told_with_its_last_words(monkeypatch):
    monkeypatch.setattr(agent, "END_AFTER_CUT", 0.01)
    with pytest.raises(GuestError) as caught:
        await agent.first_hello(Machine(), Control(BROKEN), 0.1)
    assert caught.value.code == "guest_boot_timeout" and "last words" in caught.value.message


@pytest.mark.parametrize(("error", "hosts", "off"), [
    (3, False, 3), (-3, False, 3), (90, False, 90),
    (90, True, 0), (130, True, 30), (-5, True, 5),
])  # fmt: skip
def test_a_clock_that_is_the_hosts_goes_on_while_it_is_asked(error, hosts, off):
    answer = {"clock_error_ns": error, "clock_is_hosts": hosts}
    assert agent.clock_error(answer, took=100) == off
