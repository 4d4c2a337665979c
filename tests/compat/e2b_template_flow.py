"""Templates by the official SDK's builder: sync, async, in the background, with logs and tags.

``python e2b_template_flow.py`` as e2b_flow.py; each step that holds is said.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from e2b import AsyncTemplate, BuildException, Sandbox, Template, wait_for_file

STEPS = []
NAME = f"sdk-template-{os.getpid()}"
SIZE = {"cpu_count": 1, "memory_mb": 512}


def step(function):
    STEPS.append(function)
    return function


def recipe(folder, kind=Template):
    return (
        kind(file_context_path=folder)
        .from_template("base")
        .set_envs({"GREETING": "hello", "TWICE": "$GREETING-$GREETING"})
        .set_workdir("/opt/app")
        .copy("src/*.txt", "texts/", user="root", mode=0o640)
        .copy("src", "/opt/tree")
        .run_cmd('echo "$TWICE $(whoami) $PWD" > /tmp/said')
        .set_user("worker")
        .run_cmd("whoami > ~/me")
        .set_start_cmd("echo $TWICE > /tmp/up; exec sleep 100000", wait_for_file("/tmp/up"))
    )


def context():
    folder = Path(tempfile.mkdtemp())
    (folder / "src" / "deep").mkdir(parents=True)
    (folder / "src" / "one.txt").write_text("one\n")
    (folder / "src" / "deep" / "two").write_text("two\n")
    (folder / "src" / "link").symlink_to("one.txt")
    return folder


FOLDER = context()


@step
def build_with_logs():
    said = []
    info = Template.build(recipe(FOLDER), NAME, on_build_logs=said.append, **SIZE)
    text = "\n".join(entry.message for entry in said)
    assert "whoami > ~/me" in text and "ready" in text, text
    assert {entry.level for entry in said} <= {"debug", "info", "warn", "error"}
    assert info.template_id and info.build_id


@step
def its_process_files_and_state_are_in_each_sandbox():
    with Sandbox.create(NAME, timeout=300) as sbx:
        done = sbx.commands.run(
            "pgrep -f '[s]leep 100000' > /dev/null && cat /tmp/up /tmp/said ~/me && whoami && pwd && "
            "stat -c '%a %U' texts/one.txt && cat /opt/tree/deep/two && readlink /opt/tree/link"
        )
        assert done.stdout.splitlines() == [
            "hello-hello",
            "hello-hello user /opt/app",
            "worker",
            "worker",
            "/opt/app",
            "640 root",
            "two",
            "one.txt",
        ], done.stdout


@step
def built_again_it_is_known():
    said = []
    Template.build(
        recipe(FOLDER), NAME, on_build_logs=lambda entry: said.append(entry.message), **SIZE
    )
    assert sum("CACHED" in line for line in said) >= 6, said


@step
def build_in_background():
    info = Template.build_in_background(recipe(FOLDER), NAME, tags=["second"], **SIZE)
    seen, offset = set(), 0
    deadline = time.monotonic() + 120
    while not seen & {"ready", "error"}:
        assert time.monotonic() < deadline, seen
        status = Template.get_build_status(info, logs_offset=offset)
        offset += len(status.log_entries)
        seen.add(status.status.value)
        time.sleep(0.05)
    assert "error" not in seen and "waiting" not in seen and offset, (seen, offset)
    assert Template.get_build_status(info, logs_offset=offset).log_entries == []


@step
def names_and_tags():
    assert Template.exists(NAME) and not Template.exists(f"{NAME}-none")
    info = Template.assign_tags(f"{NAME}:second", ["live", "other"])
    assert sorted(info.tags) == ["live", "other"] and info.build_id
    assert {"default", "second", "live", "other"} <= {each.tag for each in Template.get_tags(NAME)}
    Template.remove_tags(NAME, "other")
    assert "other" not in {each.tag for each in Template.get_tags(NAME)}
    with Sandbox.create(f"{NAME}:live", timeout=300) as sbx:
        assert sbx.commands.run("cat ~/me").stdout == "worker\n"


@step
def build_asynchronously():
    async def work():
        said = []
        template = AsyncTemplate().from_template(NAME).run_cmd("echo more > ~/more && cat /tmp/up")
        await AsyncTemplate.build(template, f"{NAME}-async", on_build_logs=said.append, **SIZE)
        assert await AsyncTemplate.exists(f"{NAME}-async")
        return "\n".join(entry.message for entry in said)

    assert "hello-hello" in asyncio.run(work())
    with Sandbox.create(f"{NAME}-async", timeout=300) as sbx:  # the process below goes on in it
        done = sbx.commands.run("cat ~/more; pgrep -fc '[s]leep 100000'; echo $GREETING")
        assert done.stdout.split() == ["more", "1", "hello"], done.stdout


@step
def failures_say_what_failed():
    unknown = "unauthenticated: invalid username: 'root123'"
    for command, user, why in (
        ("echo because >&2; exit 3", "root", "exit status 3"),
        ("whoami", "root123", unknown),
    ):
        said = []
        template = Template().from_template("base").run_cmd(command, user=user)
        try:
            Template.build(template, f"{NAME}-broken", on_build_logs=said.append, **SIZE)
        except BuildException as error:
            assert f"failed to run command '{command}': command failed: {why}" in str(error)
        else:
            raise AssertionError(f"{command} was built")
        if user == "root":
            assert any(entry.message == "because" and entry.level == "warn" for entry in said)


@step
def what_went_is_gone():
    for name in (NAME, f"{NAME}-async", f"{NAME}-broken"):
        assert Sandbox.delete_snapshot(name) is True  # the SDK's word for DELETE /templates
        assert not Template.exists(name)


def main():
    for function in STEPS:
        function()
        print(f"held {function.__name__}", flush=True)


if __name__ == "__main__":
    main()
    # The SDK's native HTTP threads (pyqwest) can abort an interpreter that is being finalized.
    sys.stdout.flush()
    os._exit(0)
