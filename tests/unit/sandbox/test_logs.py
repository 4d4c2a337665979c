from dataclasses import replace
from datetime import UTC, datetime, timedelta

from agentenv.engine.contract import ExitCause, ExitKind
from agentenv.model import Guest, Resources
from agentenv.sandbox.logs import entries, select
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import State

RAN = datetime(2026, 1, 1, tzinfo=UTC)
INFO = SandboxInfo(
    "a" * 20, State.RUNNING, "t", "b", "i", RAN, RAN + timedelta(hours=1), Resources(1), Guest(),
    phases={"queue": 9.0, "process": 0.1, "boot": 1.8, "init": 0.1},
)  # fmt: skip
CONSOLE = [
    "BIOS says hello",
    "[    1.500000] booted",
    "  no stamp",
    "",
    "[    3.0] Out of memory: killed",
]


def test_lines_have_the_time_of_the_guests_clock():
    found = entries(INFO, CONSOLE)
    assert [(entry.message, (entry.time - RAN).total_seconds()) for entry in found[1:]] == [
        ("BIOS says hello", -2.0), ("booted", -0.5), ("  no stamp", -0.5), ("Out of memory: killed", 1.0),
    ]  # fmt: skip
    assert [entry.level for entry in found] == ["info"] * 4 + ["error"]
    assert found[0].fields["source"] == "node"


def test_an_end_is_told_last_and_graver_if_nobody_asked_for_it():
    for kind, level in ((ExitKind.STOPPED, "info"), (ExitKind.PANIC, "error")):
        ended = replace(INFO, state=State.ENDED, cause=ExitCause(kind, "because"))
        last = entries(ended, CONSOLE)[-1]
        assert (last.level, last.message, last.fields["cause"]) == (
            level,
            "sandbox ended: because",
            kind,
        )


def test_selection():
    found = entries(INFO, CONSOLE)
    messages = [entry.message for entry in select(found, since=RAN, limit=9)]
    assert messages == ["Out of memory: killed"]
    back = select(found, since=RAN, backward=True, limit=2)
    assert [entry.message for entry in back] == ["  no stamp", "booted"]
    assert select(found, level="error", search="MEMORY", limit=9) == found[-1:]
    assert select(found, level="warn", search="nothing", limit=9) == []
