"""A node whose images lie in S3: it starts them from an empty cache, and lives through the death of
the store, of the block server, and of both."""

import concurrent.futures
import contextlib
import json
import os
import signal
from pathlib import Path

from tests.faults.node.conftest import HASH, blockd_pid, stats, tag
from tests.waiting import until


def fault(node, made):
    return node.inspect(made)["objects"]["storage_fault"]


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


def test_one_whose_reads_wait_is_killed_while_the_store_is_away(node, bucket):
    """The server is killed in it, too: what it left is taken away without the store."""
    both = [node.create("base")["sandboxID"] for _ in range(2)]
    bucket.kill()
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            readings = [pool.submit(node.cli, "exec", each, "--", *HASH) for each in both]
            until(lambda: all(fault(node, each) for each in both))
            node.cli("kill", both[0], check=True)
            node.kill()
            node.start()
            node.cli("kill", both[1], check=True)
            assert all(reading.result().returncode for reading in readings)
    finally:
        bucket.start()


def test_a_store_that_dies_stops_the_sandbox_until_it_is_back(node, bucket, made, wanted):
    """QEMU's guest at the read that fails, gVisor's processes in theirs."""
    bucket.kill()
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            reading = pool.submit(node.cli, "exec", made, "--", *HASH, timeout=300)
            fails = node.engine == "qemu"
            until(lambda: (found := fault(node, made)) and found["failed"] is fails)
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
