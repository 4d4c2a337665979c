"""A slot with a server in its guest, and an edge that knows it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import httpx
import pytest
from tests.integration.edge import rig


def _left_over() -> set[str]:
    """Of this run only: others may test on the machine at the same time."""
    named = {f"netns {p.name}" for p in Path("/run/netns").glob(f"edge-?{os.getpid()}-*")}
    mark = "=".join(next(iter(rig.MARK.items()))).encode() + b"\0"
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in environ:
            named.add(f"process {entry.name}")
    return named


@pytest.fixture(scope="module", autouse=True)
def nothing_left():
    before = _left_over()
    yield
    assert not _left_over() - before


@pytest.fixture(scope="module")
def slot():
    with rig.slot() as made:
        yield made


@pytest.fixture
async def guest(slot):
    async with rig.guest_server(slot) as server:
        yield server


@pytest.fixture
def folder():
    """Short, for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="edge-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def edge(folder, slot):
    async with rig.edge(folder, api_wait=0.2) as running:
        assert await running.control.sync([slot.route()], []) == ()
        yield running


@pytest.fixture
async def http(edge):
    async with httpx.AsyncClient(base_url=edge.url, timeout=20) as client:
        yield client
