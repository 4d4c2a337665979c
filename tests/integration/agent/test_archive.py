"""Trees in and out as tar, against GNU tar."""

import io
import os
import socket
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
from tests.waiting import until


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
        tar_of(("/aenv-escaped", None)),
        tar_of(("d/" * 300 + "f", None)),
        tar_of(("whole", None))[:1024],
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


def test_an_absolute_name_touches_nothing_outside(agent, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        info = tarfile.TarInfo(str(outside))
        info.type = tarfile.FIFOTYPE
        packed.addfile(info)
    for query in ({}, {"username": "nobody"}):
        assert post(agent, tmp_path / "into", out.getvalue(), **query).status_code == 400
    assert outside.read_bytes() == b"mine" and outside.stat().st_uid == os.getuid()


def test_a_file_that_grows_while_it_is_packed_stays_one_entry(agent, tmp_path):
    """Its content is not read as headers: here it is headers."""
    folder = tmp_path / "pub"
    folder.mkdir()
    forged = tarfile.TarInfo("pub/forged").tobuf()
    growing, stop = folder / "app.log", threading.Event()
    growing.write_bytes(forged * 1000)
    (folder / "zz").write_bytes(b"last")

    def grow():
        with growing.open("ab") as file:
            while not stop.is_set():
                file.write(forged * 100)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(5):
            with tarfile.open(fileobj=io.BytesIO(get(agent, folder).content)) as packed:
                assert packed.getnames() == ["pub", "pub/app.log", "pub/zz"]
    finally:
        stop.set()
        thread.join()


def test_comments_of_git_archive_are_passed_over(agent, tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", pax_headers={"comment": "x"}) as packed:
        packed.addfile(tarfile.TarInfo("f"))
    answer = post(agent, tmp_path / "into", out.getvalue(), username="nobody")
    assert (answer.status_code, answer.json()) == (200, {"entries": 1})


def test_the_root_is_not_packed(agent):
    assert get(agent, "/").status_code == 400


def test_a_connection_lives_on_whatever_follows_the_archives_end(agent, tmp_path):
    """Its reader is done before the body's last chunk has come, for which the answer waits."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("file"))
    body = packed.getvalue()
    with socket.create_connection(agent.address, timeout=30) as connection:
        head = f"POST /archive?path={tmp_path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked"
        chunk = b"%x\r\n%s\r\n" % (len(body), body)
        connection.sendall(head.encode() + b"\r\n\r\n" + chunk)
        until((tmp_path / "file").exists)
        for piece in (chunk, b"0\r\n\r\n"):
            connection.sendall(piece)
        answers = connection.makefile("rb")
        assert b" 200 " in answers.readline()
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 204" in answers.read()
