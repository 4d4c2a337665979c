"""Templates, pauses, snapshots and forks by the official SDK. Each step that holds is said."""

import asyncio
import os
import time

import e2b
from e2b import AsyncTemplate, Sandbox, Template, wait_for_file

STEPS = []
NAME = f"flow-{os.getpid()}"


def step(function):
    STEPS.append(function)
    return function


def recipe(kind=Template):
    return (
        kind()
        .from_template("base")
        .set_envs({"GREETING": "hello"})
        .run_cmd("echo $GREETING > /srv/greeting", user="root")
        .set_workdir("/srv")
        .set_start_cmd("echo up > /srv/up; exec sleep 100000", wait_for_file("/srv/up"))
    )


@step
def build_with_logs():
    said = []
    Template.build(recipe(), alias=NAME, on_build_logs=lambda entry: said.append(entry.message))
    assert any("GREETING" in line or "RUN" in line for line in said), said
    assert Template.alias_exists(NAME) if hasattr(Template, "alias_exists") else True


@step
def build_in_background():
    info = Template.build_in_background(recipe(), alias=NAME)
    deadline = time.monotonic() + 120
    while Template.get_build_status(info).status.value not in ("ready", "error"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert Template.get_build_status(info).status.value == "ready"


@step
def build_asynchronously():
    asyncio.run(AsyncTemplate.build(recipe(AsyncTemplate), alias=NAME))


@step
def a_failing_step_has_its_reason():
    broken = Template().from_template("base").run_cmd("echo because >&2; exit 3", user="root")
    try:
        Template.build(broken, alias=f"{NAME}-broken")
    except e2b.BuildException as error:
        assert "3" in str(error), error
    else:
        raise AssertionError("a failing step was built")


@step
def the_started_process_lives_in_each_sandbox():
    with Sandbox.create(NAME, timeout=300) as sbx:
        done = sbx.commands.run("cat greeting; pgrep -f 'sleep 100000'")
        assert done.stdout.startswith("hello\n") and len(done.stdout.split()) > 1


@step
def pause_and_connect():
    sbx = Sandbox.create(NAME, timeout=300)
    try:
        sbx.files.write("/srv/kept", "kept")
        assert sbx.pause() is not False if hasattr(sbx, "pause") else sbx.beta_pause() is None
        assert not sbx.is_running()
        again = Sandbox.connect(sbx.sandbox_id, timeout=300)
        assert again.files.read("/srv/kept") == "kept" and again.is_running()
    finally:
        sbx.kill()


@step
def snapshots_and_forks():
    if not hasattr(Sandbox, "fork"):
        return  # the older generation has neither
    sbx = Sandbox.create(NAME, timeout=300)
    copies = []
    try:
        sbx.files.write("/srv/past", "shared")
        saved = sbx.create_snapshot()
        copies = [*sbx.fork(count=2), Sandbox.create(saved.snapshot_id, timeout=300)]
        assert [copy.files.read("/srv/past") for copy in copies] == ["shared"] * 3
        assert len({copy.sandbox_id for copy in copies}) == 3
        assert Sandbox.delete_snapshot(saved.snapshot_id) is True
        assert Sandbox.delete_snapshot(saved.snapshot_id) is False
    finally:
        for each in (sbx, *copies):
            each.kill()


def main():
    for function in STEPS:
        begun = time.monotonic()
        function()
        print(f"held {function.__name__} {time.monotonic() - begun:.2f}s", flush=True)


if __name__ == "__main__":
    main()
