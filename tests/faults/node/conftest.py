"""A node of a suite's own on an S3 server of its own."""

import asyncio
import json
import os
from pathlib import Path

import pytest
import pytest_asyncio
from tests.leaks import nothing_left
from tests.s3 import s3_server
from tests.server import TestServer, new_home

from agentenv.config import Config

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
        "AENV_ENGINE": server.engine,
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
            if entry.key.startswith("first-use/"):
                continue  # of ``wanted``, too: all would be here ahead
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
    return Config(home=node.home).tag


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
