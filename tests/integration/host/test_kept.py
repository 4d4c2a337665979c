"""Processes that are started again: by the supervisor, by its successor, not when asked to end."""

import asyncio
import os
import select
import signal
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from agentenv.errors import Conflict, NotFound
from agentenv.host.kept import FIRST_PAUSE, LONGEST_PAUSE, pause
from agentenv.host.process import ProcessSpec, spec_from_json, spec_to_json
from agentenv.host.supervised import SupervisedLauncher

# Says its count and pid through descriptor 3 and stays.
SPEAK = 'echo "$AENV_RESTARTS $$" >&3; exec sleep 600'


def spec(tmp_path: Path, script: str = SPEAK) -> ProcessSpec:
    env = {"PATH": "/usr/bin:/bin"}
    return ProcessSpec("p", ("sh", "-c", script), tmp_path / "log", env, restart=True)


async def said(end: socket.socket) -> tuple[int, int]:
    """Restart count and pid, from a process that has started; the other end must be open."""
    data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, 100), 30)
    count, pid = data.split()
    return int(count), int(pid)


def is_open(end: socket.socket) -> bool:
    return not select.select([end], [], [], 0)[0]


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


async def killed_supervisor(launcher: SupervisedLauncher, tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "sup.sock").encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if path in (entry / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
    await launcher.ensure()


async def test_a_killed_process_comes_back_with_its_descriptor(launcher, tmp_path, ends):
    ours, theirs = ends
    before = await launcher.launch(spec(tmp_path), [theirs.fileno()])
    theirs.close()
    assert await said(ours) == (0, before.pid)
    for count in (1, 2):
        await launcher.signal("p", signal.SIGKILL)
        again, pid = await said(ours)
        status = await launcher.status("p")
        assert (again, status.restarts, status.pid) == (count, count, pid)
        assert status.running and pid != before.pid
    assert is_open(ours)


async def test_an_end_that_was_asked_for_stays_and_forgetting_closes(launcher, tmp_path, ends):
    ours, theirs = ends
    await launcher.launch(spec(tmp_path), [theirs.fileno()])
    theirs.close()
    await said(ours)
    await launcher.stop("p")
    ended = await launcher.wait("p")
    assert (ended.exit_status, ended.restarts) == (-signal.SIGTERM, 0)
    assert is_open(ours), "kept until forgotten"
    await launcher.launch(spec(tmp_path))
    assert (await said(ours))[0] == 0, "a successor got what was kept"
    await launcher.stop("p", signal.SIGKILL)
    await launcher.wait("p")
    await launcher.forget("p")
    assert await asyncio.get_running_loop().sock_recv(ours, 1) == b""
    assert not list((tmp_path / "run" / "sup.sock.d").iterdir())


async def test_a_new_supervisor_goes_on_with_the_descriptors(launcher, tmp_path, ends):
    ours, theirs = ends
    before = await launcher.launch(spec(tmp_path), [theirs.fileno()])
    theirs.close()
    await said(ours)
    for count in (1, 2):
        await killed_supervisor(launcher, tmp_path)
        assert (await launcher.status("p")).running
        await launcher.signal("p", signal.SIGKILL)
        again, pid = await said(ours)
        status = await launcher.status("p")
        assert (again, status.restarts, status.pid) == (count, count, pid)
        assert pid != before.pid
    await killed_supervisor(launcher, tmp_path)
    await launcher.stop("p")
    assert (await launcher.wait("p")).lost
    assert is_open(ours)


async def test_a_stop_is_remembered_by_a_new_supervisor(launcher, tmp_path, ends):
    ours, theirs = ends
    script = "trap '' TERM; " + SPEAK
    await launcher.launch(spec(tmp_path, script), [theirs.fileno()])
    await said(ours)
    await launcher.stop("p", signal.SIGTERM)
    await killed_supervisor(launcher, tmp_path)
    await launcher.signal("p", signal.SIGKILL)
    assert (await launcher.wait("p")).restarts == 0


async def test_a_descriptor_that_was_replaced_is_not_passed_on(launcher, tmp_path, ends):
    ours, theirs = ends
    script = 'echo "0 $$" >&3; exec 3</dev/null; echo there; exec sleep 600'
    await launcher.launch(spec(tmp_path, script), [theirs.fileno()])
    await said(ours)
    while not (tmp_path / "log").read_text():
        await asyncio.sleep(0.01)
    await killed_supervisor(launcher, tmp_path)
    await launcher.signal("p", signal.SIGKILL)
    ended = await launcher.wait("p")
    assert ended.lost and ended.restarts == 0


async def test_a_tight_loop_backs_off_and_can_be_called_off(launcher, tmp_path):
    script = "cut -d' ' -f1 /proc/uptime; exit 3"
    await launcher.launch(spec(tmp_path, script))
    while (status := await launcher.status("p")).restarts < 4 or status.running:
        await asyncio.sleep(0.01)
    with pytest.raises(Conflict):
        await launcher.launch(spec(tmp_path))
    with pytest.raises(Conflict):
        await launcher.quit()
    waiting = asyncio.create_task(launcher.wait("p"))
    await launcher.stop("p")
    assert (await waiting).exit_status == 3
    starts = [float(line) for line in (tmp_path / "log").read_text().split()]
    assert len(starts) == (await launcher.status("p")).restarts + 1
    for number, (one, next_one) in enumerate(pairwise(starts)):
        assert next_one - one >= pause(number) - 0.02, "the clock has steps of 10 ms"


async def test_forgetting_in_the_pause_ends_the_wait(launcher, tmp_path):
    await launcher.launch(spec(tmp_path, "exit 1"))
    while (await launcher.status("p")).restarts < 2:
        await asyncio.sleep(0.01)
    waiting = asyncio.create_task(launcher.wait("p"))
    while True:
        try:
            await launcher.forget("p")
            break
        except Conflict:
            await asyncio.sleep(0.001)
    with pytest.raises(NotFound):
        await waiting
    assert await launcher.all() == ()


def test_pauses_double_up_to_the_longest():
    assert [pause(quick) for quick in range(4)] == [FIRST_PAUSE * factor for factor in (1, 2, 4, 8)]
    assert pause(6) == pause(10**6) == LONGEST_PAUSE


def test_a_spec_survives_its_record(tmp_path):
    made = spec(tmp_path)
    assert spec_from_json(spec_to_json(made)) == made
