import json
from datetime import UTC, datetime

from agentenv.engine.contract import ExitCause, ExitKind
from agentenv.model import Guest, Resources
from agentenv.sandbox.record import SandboxInfo, from_row, to_row
from agentenv.sandbox.state import State
from agentenv.store.records import SandboxRow

NOW = datetime(2026, 1, 1, 1, 1, 1, 123456, tzinfo=UTC)


def info(**more) -> SandboxInfo:
    return SandboxInfo(
        "a" * 20, State.RUNNING, "t", "b", "i", NOW, NOW, Resources(1, 512, 8192),
        Guest({"A": "1"}, "user", "/w", ("/data",)), slot=4, access_token="tok",
        metadata={"k": "v"}, phases={"boot": 1.5}, **more,
    )  # fmt: skip


def test_a_record_comes_back_from_its_row_through_json():
    for given in (info(), info(cause=ExitCause(ExitKind.PANIC, "why", 1, ("line",)), alias="x")):
        row = to_row(given)
        stored = SandboxRow(
            **{
                **{n: getattr(row, n) for n in row.__slots__},
                "doc": json.loads(json.dumps(row.doc)),
            }
        )
        assert from_row(stored) == given
