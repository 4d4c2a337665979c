"""A home on a disk that is full: each answer is true, nothing is left, and it goes on after."""

import os
import subprocess

import pytest
from tests.leaks import HostObjects
from tests.server import TestServer, new_home


@pytest.fixture(scope="module")
def small(scratch, any_engine):
    """A server whose home is a file system of its own, with little room."""
    before = HostObjects.now()
    running = TestServer(new_home(scratch), environ={"AENV_ENGINE": any_engine})
    running.home.mkdir(mode=0o711)
    argv = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        "size=64m,mode=711",
        "aenv",
        running.home,
    ]
    subprocess.run(argv, check=True)
    try:
        running.start()
        running.cli(
            "image", "pull", f"dir:{__file__.rpartition('/')[0]}", "--name", "tiny", check=True
        )
        yield running
    finally:
        running.stop()
        running.cli("down", check=True)
        subprocess.run(["umount", running.home], check=True)
        running.home.rmdir()
    assert not HostObjects.now().more_than(before, running.home)


@pytest.fixture
def filled(small):
    """The rest of the disk, taken."""
    path = small.home / "filler"
    with path.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError:
            pass
    yield path
    path.unlink(missing_ok=True)


def folders(small):
    return os.listdir(small.home / "sandboxes")


def test_a_create_on_a_full_disk_is_refused_and_leaves_nothing(small, filled):
    before = HostObjects.now()
    answer = small.api("POST", "/v2/sandboxes", json={"templateID": "tiny"})
    assert answer.status_code in (503, 507), answer.text
    assert "Traceback" not in answer.text
    left = HostObjects.now().more_than(before, small.home)
    assert not {k: v for k, v in left.items() if k not in ("links", "mounts", "runtime")}
    assert folders(small) == []
    assert small.api("GET", "/v2/sandboxes").json() == []


def test_a_pull_on_a_full_disk_is_refused_and_leaves_nothing(small, filled, tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(3_000_000))
    keys = sorted(small.home.glob("store/*/*/*"))
    done = small.cli("image", "pull", f"dir:{tmp_path}")
    assert done.returncode == 71 and b"no space is left" in done.stderr
    assert sorted(small.home.glob("store/*/*/*")) == keys
    assert not list(small.home.glob("drafts/*"))


def test_it_goes_on_when_there_is_space_again(small):
    assert small.api("GET", "/health").status_code == 200
    answer = small.api("POST", "/v2/sandboxes", json={"templateID": "tiny"})
    assert answer.status_code == 201, answer.text
    small.cli("kill", answer.json()["sandboxID"], check=True)
    assert folders(small) == []
