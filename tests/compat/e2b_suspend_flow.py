"""Pauses, snapshots and forks by the official SDK; as e2b_template_flow.py."""

import os
import sys
import time

from e2b import Sandbox, SandboxNotFoundException, SandboxState

STEPS = []
COUNT = (
    "mkfifo /tmp/tick; exec 9<> /tmp/tick; n=0;"
    " while :; do n=$((n+1)); printf '%08d\n' $n 1<> /tmp/count; read -rt 0.01 -u 9; done"
)


def step(function):
    STEPS.append(function)
    return function


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def counts_on(sbx):
    def count():
        return int(sbx.files.read("/tmp/count"))

    before = count()
    until(lambda: count() > before)


def state(sbx):
    return Sandbox.get_info(sbx.sandbox_id).state


@step
def pause_and_connect(sbx):
    sbx.commands.run(COUNT, background=True)
    until(lambda: sbx.files.exists("/tmp/count"))
    for _ in range(2):
        assert sbx.pause() is True and sbx.pause() is False
        assert state(sbx) == SandboxState.PAUSED and not sbx.is_running()
        again = Sandbox.connect(sbx.sandbox_id, timeout=300)
        assert state(sbx) == SandboxState.RUNNING and again.is_running()
        counts_on(again)
    counts_on(sbx)  # the object that was there before goes on as well


@step
def pause_of_the_disk_alone(sbx):
    sbx.files.write("/srv/kept", "kept")
    assert sbx.pause(keep_memory=False) is True
    again = Sandbox.connect(sbx.sandbox_id, timeout=300)
    assert again.files.read("/srv/kept") == "kept"
    assert again.commands.run("pgrep -f '[c]ount.new' || echo none").stdout == "none\n"


@step
def forks_are_others_with_the_same_past(sbx):
    sbx.files.write("/srv/past", "shared")
    copies = sbx.fork(count=2, timeout=300)
    try:
        assert len({sbx.sandbox_id, *(copy.sandbox_id for copy in copies)}) == 3
        for number, copy in enumerate(copies):
            assert copy.files.read("/srv/past") == "shared"
            copy.files.write("/srv/past", str(number))
        assert [copy.files.read("/srv/past") for copy in copies] == ["0", "1"]
        assert sbx.files.read("/srv/past") == "shared"
    finally:
        for copy in copies:
            copy.kill()


@step
def snapshots_with_and_without_names(sbx):
    unnamed, named = sbx.create_snapshot(), sbx.create_snapshot(name="sdk-saved:one")
    assert named.snapshot_id == "sdk-saved:one" and named.names == ["sdk-saved:one"]
    listed = sbx.list_snapshots().next_items()
    assert [each.snapshot_id for each in listed] == [named.snapshot_id, unnamed.snapshot_id]
    sbx.files.write("/srv/past", "later")
    for saved in (unnamed, named):
        with Sandbox.create(saved.snapshot_id, timeout=300) as copy:
            assert copy.files.read("/srv/past") == "shared"
        assert Sandbox.delete_snapshot(saved.snapshot_id) is True
        assert Sandbox.delete_snapshot(saved.snapshot_id) is False


@step
def paused_at_its_deadline_and_woken_by_traffic(sbx):
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    own = Sandbox.create("base", timeout=300, lifecycle=lifecycle)
    try:
        own.files.write("/srv/kept", "kept")
        own.set_timeout(0)
        until(lambda: state(own) == SandboxState.PAUSED)
        assert own.commands.run("cat /srv/kept").stdout == "kept"
        assert state(own) == SandboxState.RUNNING
    finally:
        own.kill()


@step
def what_is_paused_can_be_killed(sbx):
    sbx.pause()
    assert Sandbox.kill(sbx.sandbox_id) is True and Sandbox.kill(sbx.sandbox_id) is False
    try:
        Sandbox.connect(sbx.sandbox_id)
    except SandboxNotFoundException:
        return
    raise AssertionError("a killed sandbox was connected to")


def main():
    sbx = Sandbox.create("base", timeout=600, request_timeout=300)
    try:
        for function in STEPS:
            function(sbx)
            print(f"held {function.__name__}", flush=True)
    finally:
        sbx.kill()


if __name__ == "__main__":
    main()
    # The SDK's native HTTP threads (pyqwest) can abort an interpreter that is being finalized.
    sys.stdout.flush()
    os._exit(0)
