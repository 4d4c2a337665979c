"""Suspension while what carries its bytes fails: the store away, the block server killed, the
cache under pressure."""

import concurrent.futures
import contextlib
import json
import os
import signal
import sqlite3

import pytest
from tests.faults.node.conftest import HASH, blockd_pid, stats
from tests.integration.suspend.conftest import COUNTER, Guest
from tests.waiting import until

LITTLE = 64 << 20  # bytes of a cache that a sandbox's reads fill


@pytest.fixture(scope="module")
def counting(node):
    guest = Guest(node, node.create("base", timeout=3600, memoryMB=256)["sandboxID"])
    guest.sh(COUNTER)
    until(lambda: guest.sh("test -e /srv/count && echo yes || true"))
    yield guest
    assert node.api("DELETE", f"/sandboxes/{guest.id}").status_code == 204
    until(lambda: not unstored(node))


@pytest.fixture
def guest(counting):
    if counting.state == "paused":  # a test failed
        counting.resume()
    return counting


def unstored(node):
    return list((node.home / "snapshots").iterdir())


def test_the_store_is_not_needed_to_pause_and_resume(node, bucket, guest):
    """Until it is back the files of the node are what there is."""
    guest.pause()
    guest.resume()  # what a guest reads on its way back is cached by now
    bucket.kill()
    try:
        for _ in range(2):
            guest.pause()
            guest.resume()
            guest.counts_on()
        guest.pause()
        assert unstored(node)
        node.kill()
        node.start()
        assert guest.state == "paused"
        guest.resume()
        guest.counts_on()
    finally:
        bucket.start()
    guest.pause()  # storing begins again with what is new
    until(lambda: not unstored(node), 90)
    guest.resume()
    guest.counts_on()


@pytest.mark.parametrize("verb", ["pause", "connect"])
def test_a_block_server_killed_meanwhile(node, guest, verb):
    """The answer is true: it is paused, or runs, as it says."""
    for _ in range(2):
        if verb == "connect":
            guest.pause()
        killed = blockd_pid(node)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            body = {"timeout": 3600} if verb == "connect" else {}
            path = f"/sandboxes/{guest.id}/{verb}"
            asked = pool.submit(node.api, "POST", path, json=body)
            os.kill(killed, signal.SIGKILL)
            done = asked.result()
        until(lambda killed=killed: blockd_pid(node) != killed)
        assert "Traceback" not in done.text
        changed = done.status_code < 300
        assert (guest.state == "running") is (changed == (verb == "connect")), done.text
        if guest.state == "paused":
            guest.resume()
        guest.counts_on()


def cached_memory(node, sandbox_id):
    """Bytes in the cache of the memory that a sandbox was restored from."""
    query = "select snapshots.doc from snapshots where sandbox_id = ?"
    with contextlib.closing(sqlite3.connect(node.home / "state.db")) as db:
        docs = [json.loads(doc) for (doc,) in db.execute(query, (sandbox_id,))]
    layers = {each["layer"] for doc in docs for each in doc["memory"] or ()}
    files = [node.home / "cache" / layer[:2] / f"{layer}.data" for layer in layers]
    return sum(path.stat().st_blocks * 512 for path in files)


@pytest.mark.full
def test_memory_that_is_mapped_outlives_a_cache_that_is_too_small(node, guest):
    """What the guest has not touched since its restore is still here, when all else was swept."""
    wanted = guest.sh("head -c 96M /dev/urandom > /dev/shm/pages; sha256sum < /dev/shm/pages")
    guest.pause()
    until(lambda: not unstored(node), 90)
    node.stop()
    node.environ["AENV_CACHE_SIZE"] = str(LITTLE)
    node.start()
    try:
        guest.resume()
        other = node.create("base", timeout=900)["sandboxID"]
        missed, cached = stats(node)["cache_misses"], cached_memory(node, guest.id)
        node.cli("exec", other, "--", *HASH, check=True)
        node.cli("kill", other, check=True)
        assert stats(node)["cache_misses"] > missed  # there was no room for what had been here
        assert cached_memory(node, guest.id) >= cached > LITTLE / 2
        assert guest.sh("sha256sum < /dev/shm/pages") == wanted
        guest.counts_on()
    finally:
        node.stop()
        node.environ.pop("AENV_CACHE_SIZE")
        node.start()
    guest.sh("rm /dev/shm/pages")
