import pytest

from agentenv.engine.cause import decide
from agentenv.engine.contract import ExitKind

PANIC = ("boot", "[ 1.0] Kernel panic - not syncing: sysrq triggered crash", "[ 1.1] CPU: 0")


@pytest.mark.parametrize(
    ("facts", "kind", "word"),
    [
        ({"status": -9}, ExitKind.KILLED, "SIGKILL"),
        ({"status": -9, "asked": True}, ExitKind.STOPPED, "request"),
        ({"status": -9, "oom_kills": 1}, ExitKind.OUT_OF_MEMORY, "memory"),
        ({"status": None, "oom_kills": 2}, ExitKind.OUT_OF_MEMORY, "memory"),
        ({"status": -9, "oom_kills": 1, "asked": True}, ExitKind.STOPPED, "request"),
        ({"status": 0}, ExitKind.STOPPED, "powered itself off"),
        ({"status": 0, "console": PANIC}, ExitKind.PANIC, "sysrq triggered"),
        ({"status": 0, "console": (*PANIC, *["trace"] * 60)}, ExitKind.PANIC, "sysrq triggered"),
        ({"status": 0, "console": ("agentenv-init: fatal: no disk",)}, ExitKind.FAILED, "no disk"),
        ({"status": None}, ExitKind.UNKNOWN, "nobody watched"),
        ({"status": 1, "engine_log": ("a", "qemu: bad -device")}, ExitKind.FAILED, "bad -device"),
        ({"status": 1}, ExitKind.FAILED, "exit status 1"),
        ({"status": -99}, ExitKind.KILLED, "signal 99"),
    ],
)
def test_the_cause_is_the_most_telling_fact(facts, kind, word):
    defaults = {"status": 0, "asked": False, "oom_kills": 0, "console": (), "engine_log": ()}
    cause = decide(engine="QEMU", **{**defaults, **facts})
    assert cause.kind is kind and word in cause.reason
    assert cause.status == facts["status"] and len(cause.console) <= 40


@pytest.mark.parametrize("after", [0, 60, 300])
def test_a_panics_own_words_are_kept_however_long_its_trace(after):
    facts = {"status": 0, "asked": False, "oom_kills": 0, "engine_log": ()}
    console = (*["boot"] * 60, *PANIC[1:], *["trace"] * after)
    kept = decide(engine="QEMU", console=console, **facts).console
    assert len(kept) <= 40 and PANIC[1] in kept
