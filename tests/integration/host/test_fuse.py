"""FUSE mounts without a server, and with one that is killed while the supervisor keeps it alive."""

import asyncio
import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from agentenv.errors import InfraError
from agentenv.host import fuse
from agentenv.host.process import ProcessSpec
from agentenv.host.supervised import SupervisedLauncher

ROOT = Path(__file__).parents[3]
SERVERS = [ROOT / "target" / kind / "examples" / "folder" for kind in ("debug", "release")]
CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def point(tmp_path: Path):
    path = tmp_path / "a mount"
    path.mkdir()
    yield path
    fuse.unmount(path, force=True)


def test_mount_and_unmount(point):
    assert not fuse.is_mounted(point)
    fd = fuse.mount(point)
    assert fuse.is_mounted(point) and not os.get_inheritable(fd)
    fuse.raise_read_ahead(point)
    fuse.unmount(point)
    assert not fuse.is_mounted(point)
    fuse.unmount(point)
    os.close(fd)


def test_unmount_takes_away_what_lies_on_top_of_each_other(point):
    fds = [fuse.mount(point), fuse.mount(point)]
    fuse.unmount(point)
    assert not fuse.is_mounted(point)
    for fd in fds:
        os.close(fd)


def test_a_closed_descriptor_kills_the_mount_and_it_can_still_go(point):
    os.close(fuse.mount(point))
    assert fuse.is_mounted(point)
    with pytest.raises(OSError) as caught:
        (point / "a").stat()
    assert caught.value.errno == errno.ENOTCONN
    fuse.unmount(point)
    assert not fuse.is_mounted(point)


def test_force_frees_who_waits_for_a_server_that_never_comes(point):
    fd, failed = fuse.mount(point), []

    def look():
        try:
            (point / "a").stat()
        except OSError as error:
            failed.append(error.errno)

    thread = threading.Thread(target=look)
    thread.start()
    # INIT is answered by nobody, so the look-up waits in the kernel.
    while "fuse" not in Path(f"/proc/self/task/{thread.native_id}/wchan").read_text():
        time.sleep(0.01)
    fuse.unmount(point, force=True)
    thread.join(30)
    assert failed and failed[0] in (errno.ENOTCONN, errno.ECONNABORTED)
    os.close(fd)


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(InfraError) as caught:
        fuse.mount(tmp_path / "absent")
    assert caught.value.code == "fuse_failed" and "No such file" in caught.value.message
    with pytest.raises(InfraError) as caught:
        fuse.raise_read_ahead(tmp_path)
    assert caught.value.fix


async def test_a_killed_server_comes_back_to_the_reads_in_flight(point, tmp_path):
    server = next((path for path in SERVERS if path.exists()), None)
    if server is None:
        pytest.skip("build it: cargo build -p agentenv-fuse --examples")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(CONTENT)
    launcher = SupervisedLauncher(tmp_path / "run" / "s")
    await launcher.ensure()
    argv = (str(server), "3", str(tmp_path / "files"), str(tmp_path / "state"))
    fd = fuse.mount(point)
    await launcher.launch(ProcessSpec("blocks", argv, tmp_path / "log", restart=True), [fd])
    os.close(fd)
    try:
        await asyncio.to_thread((point / "a").stat)
        fuse.raise_read_ahead(point)
        (tmp_path / "state.hold").touch()
        reading = asyncio.create_task(asyncio.to_thread((point / "a").read_bytes))
        for count in (1, 2):
            while not (tmp_path / "state.reading").exists():
                await asyncio.sleep(0.01)
            (tmp_path / "state.reading").unlink()
            await launcher.signal("blocks", signal.SIGKILL)
            while (await launcher.status("blocks")).restarts < count:
                await asyncio.sleep(0.01)
        (tmp_path / "state.hold").unlink()
        assert await reading == CONTENT
    finally:
        fuse.unmount(point, force=True)
        await launcher.stop("blocks", signal.SIGKILL)
        await launcher.wait("blocks")
        await launcher.quit()
