"""A node whose images lie in S3: it starts them from an empty cache, and lives through the death of
the store, of the block server, and of both."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import pytest_asyncio
from tests.leaks import nothing_left
from tests.s3 import s3_server
from tests.server import TestServer, new_home
from tests.waiting import until

# Reads most of what Python consists of, little of which a boot touches.
HASH = ["sh", "-c", "cat /usr/lib/python3.11/*.py /usr/lib/python3.11/*/*.py | sha256sum"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bucket():
    async with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def node(scratch, server, bucket, wanted):
    """A node of its own on the bucket, which holds what the session's server pulled. That has done
    what it does for ``wanted`` by now, so what is counted here is this node's."""
    environ = {
        **bucket.keys,
        "AENV_STORE": bucket.url("node", timeout="3"),
        "AENV_STORE_PATIENCE": "1",
    }
    running = TestServer(new_home(scratch), environ=environ)
    copy_store(server.home / "store", bucket)
    running.home.mkdir(mode=0o711)
    [image] = json.loads(running.cli("image", "ls", "--store", check=True).stdout)
    running.cli("image", "pull", f"store:{image['id']}", "--name", "base", check=True)
    with nothing_left(running.home):
        running.start()
        yield running
        running.close()


def copy_store(folder, bucket):
    from agentenv.store.objects import open_objects

    async def copy():
        source, target = await open_objects(str(folder)), await open_objects(bucket.url("node"))
        for entry in await source.list(""):
            await target.put(entry.key, await source.get(entry.key, 1 << 30))

    before = dict(os.environ)
    os.environ.update(bucket.keys)
    try:
        asyncio.run(copy())
    finally:
        os.environ.clear()
        os.environ.update(before)


def stats(node):
    return json.loads(node.cli("store", "stats", "-o", "json", check=True).stdout)


def blockd_pid(node):
    [record] = Path("/run/agentenv").glob(f"{tag(node)}/supervisor.sock.d/blockd.json")
    return json.loads(record.read_text())["pid"]


def tag(node):
    from agentenv.config import Config

    return Config(home=node.home).tag


def fault(node, made):
    return node.inspect(made)["objects"]["storage_fault"]


@pytest.fixture(scope="module")
def wanted(server):
    """What the hash is on a node that has all of the image."""
    made = server.create()["sandboxID"]
    try:
        return server.cli("exec", made, "--", *HASH, check=True).stdout
    finally:
        server.cli("kill", made, check=True)


@pytest.fixture
def made(node):
    created = node.create("base", timeout=900)["sandboxID"]
    yield created
    node.cli("kill", created)


def test_it_starts_from_an_empty_cache_reading_what_it_touches(node, server):
    [image] = json.loads(node.cli("image", "ls", "-o", "json", check=True).stdout)
    made = node.create("base")["sandboxID"]
    try:
        done = node.cli("exec", made, "--", "python3", "-c", "import json, ssl; print(6 * 7)")
        assert done.stdout == b"42\n"
        first = stats(node)
        assert 0 < first["fetched_bytes"] < image["size"] / 8
        assert first["cache_bytes"] < image["size"] / 3
        other = node.create("base")["sandboxID"]
        node.cli("kill", other, check=True)
        again = stats(node)["fetched_bytes"] - first["fetched_bytes"]
        assert again < first["fetched_bytes"] / 20
    finally:
        node.cli("kill", made, check=True)


def test_a_store_that_dies_stops_the_sandbox_until_it_is_back(node, bucket, made, wanted):
    bucket.kill()
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            reading = pool.submit(node.cli, "exec", made, "--", *HASH, timeout=300)
            until(lambda: (fault(node, made) or {}).get("failed"))
            assert "unavailable" in fault(node, made)["cause"]
            assert not reading.done()
            assert node.api("GET", f"/sandboxes/{made}").status_code == 200
            bucket.start()
            assert reading.result().stdout == wanted
    finally:
        if bucket.process is None:
            bucket.start()
    until(lambda: fault(node, made) is None)
    assert node.cli("exec", made, "--", "echo", "on", check=True).stdout == b"on\n"


def test_a_killed_block_server_is_back_before_the_sandbox_notices(node, made, wanted):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reading = pool.submit(node.cli, "exec", made, "--", *HASH, timeout=300)
        for _ in range(3):
            killed = blockd_pid(node)
            os.kill(killed, signal.SIGKILL)
            until(lambda killed=killed: blockd_pid(node) != killed)
        assert reading.result().stdout == wanted
    assert node.cli("exec", made, "--", "echo", "on", check=True).stdout == b"on\n"
    other = node.create("base")["sandboxID"]
    node.cli("kill", other, check=True)


def test_what_is_cached_starts_while_the_store_is_away(node, bucket, made):
    """The server too: it was stopped, and comes up without the store."""
    bucket.kill()
    try:
        node.kill()
        node.start()
        assert node.cli("exec", made, "--", "echo", "on", check=True).stdout == b"on\n"
        other = node.create("base")["sandboxID"]
        assert node.cli("exec", other, "--", "echo", "on", check=True).stdout == b"on\n"
        node.cli("kill", other, check=True)
        done = node.cli("store", "stats")
        assert done.returncode == 71 and b"Traceback" not in done.stderr
    finally:
        bucket.start()


def test_a_restart_of_the_server_does_not_touch_it(node, made, wanted):
    pid = blockd_pid(node)
    node.kill()
    node.start()
    assert blockd_pid(node) == pid
    assert node.cli("exec", made, "--", *HASH, check=True).stdout == wanted


def test_a_server_with_other_options_renews_the_block_server(node, made, wanted):
    pid = blockd_pid(node)
    node.stop()
    node.environ["AENV_CACHE_SIZE"] = str(1 << 30)
    node.start()
    assert blockd_pid(node) != pid
    assert node.cli("exec", made, "--", *HASH, check=True).stdout == wanted
    node.stop()
    store = node.environ["AENV_STORE"]
    node.environ["AENV_STORE"] = str(node.home / "elsewhere")
    done = node.cli("serve", "--listen", f"127.0.0.1:{node.port}")
    node.environ["AENV_STORE"] = store
    assert done.returncode == 64 and b"store_differs" in done.stderr
    node.start()
    assert node.cli("exec", made, "--", "echo", "on", check=True).stdout == b"on\n"


def test_both_dead_at_once_is_told(node):
    """Nobody held the mount any more: what ran on it is over, what comes next runs."""
    made = node.create("base")["sandboxID"]
    supervisor = supervisor_pid(node)
    for pid in (supervisor, blockd_pid(node)):
        os.kill(pid, signal.SIGKILL)
    until(lambda: node.api("GET", f"/sandboxes/{made}").status_code == 404)
    assert "storage was lost" in node.api("GET", f"/sandboxes/{made}").text
    other = node.create("base")["sandboxID"]
    assert node.cli("exec", other, "--", "echo", "on", check=True).stdout == b"on\n"
    node.cli("kill", other, check=True)


def supervisor_pid(node):
    words = f"agentenv.host.supervisor\0/run/agentenv/{tag(node)}/".encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if words in entry.read_bytes():
                return int(entry.parent.name)
    raise AssertionError("no supervisor")


def test_what_was_read_first_is_remembered_for_other_nodes(node, made, bucket):
    def remembered():
        return list((bucket.files / "node/first-use").glob("*"))

    until(remembered, seconds=60)
    chunks = json.loads(remembered()[0].read_text())
    assert sum(len(each) for each in chunks.values()) > 10
