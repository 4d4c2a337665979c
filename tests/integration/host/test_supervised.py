"""The supervisor with real children: launch, descriptors, signals, loss and adoption."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agentenv.errors import Conflict, InfraError, NotFound
from agentenv.host.process import ProcessSpec, start_time
from agentenv.host.supervised import SupervisedLauncher


def spec(tmp_path: Path, *argv: str, name: str = "p", **more) -> ProcessSpec:
    return ProcessSpec(name, argv, tmp_path / "log", {"PATH": "/usr/bin:/bin"}, **more)


def supervisor_pid(tmp_path: Path) -> int:
    path = str(tmp_path / "run" / "sup.sock")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if path.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("no supervisor")


async def test_exit_status_and_output_are_kept(launcher, tmp_path):
    await launcher.launch(spec(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 7"))
    ended = await launcher.wait("p")
    assert ended.exit_status == 7 and not ended.running
    assert (tmp_path / "log").read_text() == "out\nerr\n"
    await launcher.forget("p")
    assert await launcher.status("p") is None
    await launcher.forget("p")
    with pytest.raises(NotFound):
        await launcher.wait("p")


async def test_identity_is_dropped_and_session_is_own(launcher, tmp_path):
    script = "id -u; id -g; id -G; ps -o sid= -p $$; grep NoNewPrivs /proc/self/status"
    status = await launcher.launch(spec(tmp_path, "sh", "-c", script, uid=54321, gid=54322))
    await launcher.wait("p")
    words = (tmp_path / "log").read_text().split()
    assert words == ["54321", "54322", "54322", str(status.pid), "NoNewPrivs:", "1"]


async def test_descriptors_arrive_from_three_on(launcher, tmp_path):
    left, right = os.pipe()
    other = os.open("/dev/null", os.O_RDONLY)
    await launcher.launch(
        spec(tmp_path, "sh", "-c", "echo through >&4; ls /proc/self/fd | tr '\\n' ' '"),
        [other, right],
    )
    await launcher.wait("p")
    assert os.read(left, 100) == b"through\n"
    assert (tmp_path / "log").read_text().split()[:5] == ["0", "1", "2", "3", "4"]
    for fd in (left, right, other):
        os.close(fd)


async def test_a_running_name_is_taken_and_a_signal_ends_it(launcher, tmp_path):
    await launcher.launch(spec(tmp_path, "sleep", "600"))
    with pytest.raises(Conflict) as caught:
        await launcher.launch(spec(tmp_path, "sleep", "600"))
    assert caught.value.code == "conflict"
    with pytest.raises(Conflict):
        await launcher.forget("p")
    with pytest.raises(Conflict):
        await launcher.quit()
    await launcher.signal("p", signal.SIGTERM)
    assert (await launcher.wait("p")).exit_status == -signal.SIGTERM
    await launcher.signal("p", signal.SIGTERM)


async def test_a_program_that_cannot_start_is_an_error_and_leaves_no_record(launcher, tmp_path):
    with pytest.raises(InfraError) as caught:
        await launcher.launch(spec(tmp_path, "/no/such/program"))
    assert caught.value.code == "launch_failed" and "No such file" in caught.value.message
    with pytest.raises(InfraError):
        await launcher.launch(spec(tmp_path, "true", netns=tmp_path / "none"))
    assert await launcher.all() == ()


async def test_children_survive_a_killed_supervisor_and_are_adopted(launcher, tmp_path):
    before = await launcher.launch(spec(tmp_path, "sleep", "600"))
    await launcher.launch(spec(tmp_path, "sleep", "0", name="done"))
    await launcher.wait("done")
    os.kill(supervisor_pid(tmp_path), signal.SIGKILL)
    await launcher.ensure()
    after = await launcher.status("p")
    assert after == before and start_time(before.pid) == before.start_time
    done = await launcher.status("done")
    assert done is not None and done.exit_status == 0
    await launcher.signal("p", signal.SIGKILL)
    ended = await launcher.wait("p")
    assert ended.lost and not ended.running


async def test_two_supervisors_do_not_fight_for_one_socket(launcher, tmp_path):
    first = supervisor_pid(tmp_path)
    await asyncio.gather(
        *(SupervisedLauncher(tmp_path / "run" / "sup.sock").ensure() for _ in range(3))
    )
    assert supervisor_pid(tmp_path) == first


async def test_orphans_are_reaped(launcher, tmp_path):
    await launcher.launch(spec(tmp_path, "sh", "-c", "(sleep 0.05 & echo $!) ; exit 0"))
    await launcher.wait("p")
    orphan = int((tmp_path / "log").read_text())
    async with asyncio.timeout(10):
        while Path(f"/proc/{orphan}").exists():
            await asyncio.sleep(0.01)
