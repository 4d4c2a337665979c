"""Files: whole or as they were, whatever their size, name or luck."""

import base64
import contextlib
import gzip
import hashlib
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from tests.integration.agent.conftest import TOKEN

BINARY = {"Content-Type": "application/octet-stream"}
BIG = 2 << 30


def put(agent, path, content, headers=BINARY, **query):
    return agent.http.post(
        "/files", params={"path": str(path), **query}, content=content, headers=headers
    )


def get(agent, path, **headers):
    return agent.http.get("/files", params={"path": str(path)}, headers=headers)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture
def ext4_disk(tmp_path):
    """As guests have: 16 MiB of ext4."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("size", [0, 1, 255, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 5 << 20])
def test_content_of_any_size_comes_back(agent, tmp_path, size):
    data = os.urandom(size)
    for _ in range(2):  # made, then replaced
        assert put(agent, tmp_path / "f", data).status_code == 200
        assert get(agent, tmp_path / "f").content == data


def test_replacing_keeps_the_file_itself(agent, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old" * 200_000)
    os.link(path, tmp_path / "other")
    for data in (b"new", os.urandom(700_000), b""):
        assert put(agent, path, data).status_code == 200
        assert (tmp_path / "other").read_bytes() == data


def test_names_of_255_bytes_and_of_any_letters(agent, tmp_path):
    for name in ("x" * 255, "ä" * 127, "a b\n\t'\"%?&#", "\U0001f600"):
        assert put(agent, tmp_path / name, b"1").status_code == 200
        assert get(agent, tmp_path / name).content == b"1"
        entry = agent.call("filesystem.Filesystem/Stat", {"path": str(tmp_path / name)}).json()
        assert entry["entry"]["name"] == name
    assert put(agent, tmp_path / ("x" * 256), b"1").status_code == 400


@pytest.mark.parametrize("disk", ["small_disk", "ext4_disk"])
@pytest.mark.parametrize("size", [100 << 10, 12 << 20, 40 << 20])
def test_a_full_disk_leaves_the_old_file_whole(agent, request, disk, size):
    place = request.getfixturevalue(disk)
    (place / "old").write_bytes(b"precious" * 1000)
    with (place / "filler").open("wb") as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
            filler.flush()
    for name in ("old", "new"):
        answer = put(agent, place / name, bytes([1]) * size)
        assert answer.status_code == 507, answer.text
        assert answer.json()["message"] == "not enough disk space"
    assert (place / "old").read_bytes() == b"precious" * 1000
    assert sorted(p.name for p in place.iterdir() if p.name != "lost+found") == ["filler", "old"]


def broken_off(agent, path, promised, sent):
    """An upload whose client vanishes."""
    with agent.connect() as connection:
        head = f"POST /files?path={path} HTTP/1.1\r\nHost: x\r\nContent-Length: {promised}\r\n\r\n"
        connection.sendall(head.encode() + bytes(sent))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.parametrize("sent", [10, 3 << 20])
def test_an_upload_that_breaks_off_changes_nothing(agent, tmp_path, sent):
    (tmp_path / "old").write_bytes(b"old content")
    for name in ("old", "new"):
        broken_off(agent, tmp_path / name, 64 << 20, sent)
    deadline = time.monotonic() + 10
    while (tmp_path / "new").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # Its turn comes only after the broken one has been undone.
    assert put(agent, tmp_path / "new", b"x").status_code == 200
    assert (tmp_path / "old").read_bytes() == b"old content"


def test_damaged_gzip_changes_nothing(agent, tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    packed = gzip.compress(os.urandom(1 << 20))
    headers = {**BINARY, "Content-Encoding": "gzip"}
    for bad in (packed[:-100], b"no gzip at all"):
        for name in ("old", "new"):
            assert put(agent, tmp_path / name, bad, headers).status_code == 400
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"
    assert put(agent, tmp_path / "old", packed, headers).status_code == 200
    assert (tmp_path / "old").read_bytes() == gzip.decompress(packed)


def test_two_uploads_to_one_path_do_not_mix(agent, tmp_path):
    import concurrent.futures

    contents = [bytes([number]) * (3 << 20) for number in range(6)]
    (tmp_path / "f").write_bytes(b"x" * 1000)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda data: put(agent, tmp_path / "f", data), contents))
    assert {answer.status_code for answer in answers} == {200}
    assert (tmp_path / "f").read_bytes() in contents


def test_two_gigabytes_either_way_in_bounded_memory(agent, tmp_path):
    """The file has holes, so that no disk is measured; every byte passes the agent."""
    source = tmp_path / "big"
    with source.open("wb") as file:
        file.truncate(BIG)
    size = 0
    with agent.http.stream("GET", "/files", params={"path": str(source)}) as answer:
        for data in answer.iter_raw(1 << 20):
            size += len(data)
    assert size == BIG

    def zeroes():
        piece = bytes(1 << 20)
        for _ in range(BIG >> 20):
            yield piece

    sink = Path("/dev/shm") / f"aenv-big-{os.getpid()}"
    try:
        assert put(agent, sink, zeroes()).status_code == 200
        assert sink.stat().st_size == BIG
    finally:
        sink.unlink(missing_ok=True)
    assert agent.rss() < 32 << 20


def test_ranges(agent, tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(100)))
    part = get(agent, tmp_path / "f", Range="bytes=10-19")
    assert (part.status_code, part.content) == (206, bytes(range(10, 20)))
    assert part.headers["content-range"] == "bytes 10-19/100"
    assert get(agent, tmp_path / "f", Range="bytes=100-").status_code == 416


def test_files_of_proc_are_read_to_their_end(agent):
    assert get(agent, "/proc/sys/kernel/random/boot_id").text.strip()


def test_compose_joins_and_removes_its_sources(agent, tmp_path):
    for name, data in (("a", b"1" * 300_000), ("b", b""), ("c", b"3")):
        (tmp_path / name).write_bytes(data)
    message = {
        "source_paths": [str(tmp_path / n) for n in "abc"],
        "destination": str(tmp_path / "d/e"),
    }
    answer = agent.http.post("/files/compose", json=message)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"name": "e", "type": "file", "path": str(tmp_path / "d/e")}
    assert (tmp_path / "d/e").read_bytes() == b"1" * 300_000 + b"3"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_compose_that_fails_removes_nothing(agent, tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "to").write_bytes(b"old")
    message = {
        "source_paths": [str(tmp_path / "a"), str(tmp_path / "none")],
        "destination": str(tmp_path / "to"),
    }
    answer = agent.http.post("/files/compose", json=message)
    assert (answer.status_code, answer.json()["code"]) == (404, 404)
    assert (tmp_path / "a").exists() and (tmp_path / "to").read_bytes() == b"old"
    for bad in ({}, {"source_paths": [], "destination": "/x"}, {"source_paths": 3}):
        assert agent.http.post("/files/compose", json=bad).status_code == 400


def signed(path, operation="read", token=TOKEN, until=None, user=""):
    raw = f"{path}:{operation}:{user}:{token}" + (f":{until}" if until else "")
    digest = base64.b64encode(hashlib.sha256(raw.encode()).digest()).decode().rstrip("=")
    return {"path": str(path), "signature": f"v1_{digest}", **({"signature_expiration": until} if until else {})}  # fmt: skip


def test_signatures_open_files_and_nothing_else(introduced, tmp_path):
    path = tmp_path / "f"
    later, earlier = int(time.time()) + 60, int(time.time()) - 60
    http = introduced.http
    assert http.post("/files", params=signed(path, "write"), content=b"1").status_code == 200
    assert http.get("/files", params=signed(path, until=later)).content == b"1"
    assert http.head("/files", params=signed(path)).status_code == 200
    for query, message in (
        (signed(path, until=earlier), "signature is already expired"),
        (signed(path, token="other"), "invalid signature"),
        (signed(path, "write"), "invalid signature"),
        ({**signed(path), "path": "/etc/passwd"}, "invalid signature"),
        ({"path": str(path)}, "missing signature query parameter"),
    ):
        answer = http.get("/files", params=query)
        assert (answer.status_code, answer.json()) == (401, {"code": 401, "message": message})
    for route in ("/archive", "/metrics", "/tcp", "/envs"):
        assert http.get(route, params=signed(path)).status_code == 401, route
    assert http.get("/envs", headers={"X-Access-Token": TOKEN}).json()["FROM_HOST"] == "1"


def test_gzip_of_several_members_and_none(agent, tmp_path):
    headers = {**BINARY, "Content-Encoding": "gzip"}
    both = gzip.compress(b"one") + gzip.compress(b"two")
    assert put(agent, tmp_path / "f", both, headers).status_code == 200
    assert (tmp_path / "f").read_bytes() == b"onetwo"
    assert (
        put(agent, tmp_path / "g", gzip.compress(b"one") + b"garbage", headers).status_code == 400
    )


def test_a_refused_upload_leaves_its_connection_usable(agent, tmp_path):
    """Or says that it does not: the next request on it must not meet a closed one."""
    refused = {**BINARY, "Content-Encoding": "br"}
    for size in (300_000, 5_000_000):
        for _ in range(10):
            assert put(agent, tmp_path / "f", bytes(size), refused).status_code == 400
            assert put(agent, tmp_path / "g", b"n").status_code == 200
            bad = agent.http.post(
                "/archive", params={"path": str(tmp_path / "a")}, content=bytes([1]) * size
            )
            assert bad.status_code == 400
            assert put(agent, tmp_path / "g", b"n").status_code == 200


def test_compose_keeps_what_is_its_destination_by_another_name(agent, tmp_path):
    for name, data in (("a", b"1"), ("c", b"2")):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "link").symlink_to("c")
    message = {
        "source_paths": [str(tmp_path / "a"), str(tmp_path / "c")],
        "destination": str(tmp_path / "link"),
    }
    assert agent.http.post("/files/compose", json=message).status_code == 200
    assert (tmp_path / "c").read_bytes() == b"12" and not (tmp_path / "a").exists()


def test_a_loop_of_links_is_the_callers(agent, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert put(agent, tmp_path / "loop", b"1").status_code == 400


def test_metadata_that_cannot_be_kept_leave_no_file(agent, tmp_path):
    """ramfs has no user attributes."""
    place = tmp_path / "ram"
    place.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", place], check=True)
    try:
        answer = put(agent, place / "f", b"1", {**BINARY, "X-Metadata-a": "b"})
        assert answer.status_code >= 400, answer.text
        assert not (place / "f").exists()
        assert put(agent, place / "f", b"1").status_code == 200
    finally:
        subprocess.run(["umount", place], check=True)
