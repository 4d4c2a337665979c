"""Trees in and out as tar, against GNU tar."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest


def get(agent, path):
    return agent.http.get("/archive", params={"path": str(path)})


def post(agent, path, content, **query):
    return agent.http.post("/archive", params={"path": str(path), **query}, content=content)


def facts(root):
    """What tar keeps, by relative path."""
    found = {}
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            stat = os.lstat(path)
            link = os.readlink(path) if os.path.islink(path) else None
            content = Path(path).read_bytes() if os.path.isfile(path) and not link else None
            found[os.path.relpath(path, root)] = (
                oct(stat.st_mode), stat.st_uid, stat.st_gid, int(stat.st_mtime), stat.st_rdev, link, content,
            )  # fmt: skip
    return found


@pytest.fixture
def tree(tmp_path):
    """One of everything."""
    root = tmp_path / "tree"
    (root / "deep" / ("d" * 120) / ("e" * 120)).mkdir(parents=True)
    (root / "deep" / ("d" * 120) / ("e" * 120) / "leaf").write_bytes(b"leaf")
    (root / "plain").write_bytes(os.urandom(100_000))
    (root / "empty").touch()
    (root / "tool").write_bytes(b"#!/bin/sh\n")
    (root / "tool").chmod(0o4755)
    os.link(root / "plain", root / "twin")
    (root / "link").symlink_to("plain")
    (root / "dangling").symlink_to("/nowhere/at/all")
    os.mkfifo(root / "pipe")
    os.mknod(root / "null", 0o20666, os.makedev(1, 3))
    (root / os.fsdecode(b"not-\xff-text")).write_bytes(b"1")
    with (root / "holes").open("wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"island")
    os.chown(root / "plain", 1234, 5678)
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, (1_600_000_000, 1_500_000_000), follow_symlinks=False)
    os.utime(root, (1, 1_400_000_000))
    return root


def test_a_tree_comes_out_as_gnu_tar_would_have_it(agent, tree, tmp_path):
    packed = get(agent, tree)
    assert packed.status_code == 200
    assert len(packed.content) < 4 << 20, "holes travel as holes"
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["tar", "-x", "-C", out], input=packed.content, check=True)
    assert facts(out / "tree") == facts(tree)
    assert (out / "tree" / "twin").stat().st_ino == (out / "tree" / "plain").stat().st_ino
    assert (out / "tree" / "holes").stat().st_blocks < 1000


def test_a_tree_goes_in_as_gnu_tar_would_have_it(agent, tree, tmp_path):
    packed = subprocess.run(
        ["tar", "-c", "--sparse", "-C", tmp_path, "tree"], capture_output=True, check=True
    ).stdout
    into = tmp_path / "into" / "made"
    answer = post(agent, into, packed)
    assert answer.status_code == 200, answer.text
    assert facts(into / "tree") == facts(tree)
    assert (into / "tree" / "twin").stat().st_ino == (into / "tree" / "plain").stat().st_ino
    assert (into / "tree" / "holes").stat().st_blocks < 1000


def test_all_of_one_owner(agent, tree, tmp_path):
    packed = subprocess.run(["tar", "-c", "-C", tmp_path, "tree"], capture_output=True, check=True)
    into = tmp_path / "into"
    answer = post(agent, into, packed.stdout, username="nobody")
    assert answer.status_code == 200, answer.text
    owners = {os.lstat(path).st_uid for path in into.rglob("*")}
    assert owners == {65534}
    assert int((into / "tree").stat().st_mtime) == 1_400_000_000


def test_one_file(agent, tmp_path):
    (tmp_path / "f").write_bytes(b"1")
    with tarfile.open(fileobj=io.BytesIO(get(agent, tmp_path / "f").content)) as packed:
        assert packed.getnames() == ["f"]


def tar_of(*entries) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        for name, target in entries:
            info = tarfile.TarInfo(name)
            if target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, target
                packed.addfile(info)
            else:
                info.size = 1
                packed.addfile(info, io.BytesIO(b"x"))
    return out.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        tar_of(("../escaped", None)),
        tar_of(("link", "/"), ("link/escaped", None)),
        tar_of(("link", ".."), ("link/escaped", None)),
        b"no archive" * 100,
        tar_of(("cut", None))[:600],
    ],
)
def test_hostile_and_damaged_archives_are_refused(agent, tmp_path, content):
    into = tmp_path / "a" / "into"
    answer = post(agent, into, content)
    assert answer.status_code == 400, answer.text
    assert "archive" in answer.json()["message"]
    assert not (tmp_path / "a" / "escaped").exists() and not os.path.exists("/escaped")


def test_what_is_not_there(agent):
    assert get(agent, "/nowhere").status_code == 404
    assert agent.http.get("/archive").status_code == 400
    assert post(agent, "/dev/null/x", tar_of(("f", None))).status_code == 400
