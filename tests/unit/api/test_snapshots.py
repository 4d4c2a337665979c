"""Codes and bodies of the routes that pause, resume, save and copy."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api import errors, snapshots
from agentenv.cluster.contract import SnapshotInfo
from agentenv.errors import Conflict, InfraError
from agentenv.model import Guest, Resources
from agentenv.sandbox.record import SandboxInfo, Verdict
from agentenv.sandbox.state import State

ID, NOW = "s" * 20, datetime(2026, 12, 2, tzinfo=UTC)
VERDICT = Verdict(1.5, True, False, 2, True)
INFO = SandboxInfo(
    ID, State.RUNNING, "tpl", "b", "i", NOW, NOW, Resources(1), Guest(), access_token="tok"
)


class Remembering:
    """Says what it was asked."""

    def __init__(self):
        self.asked, self.state = [], State.RUNNING

    async def get(self, sandbox_id):
        return replace(INFO, state=self.state)

    async def connect(self, sandbox_id, seconds, *, memory=True):
        self.asked.append((seconds, memory))
        resumed = self.state is State.PAUSED
        return replace(INFO, restore=VERDICT if resumed else None), resumed

    async def pause(self, sandbox_id, how):
        if self.state is State.PAUSED:
            raise Conflict("it is paused", state="paused")
        self.asked.append(how)

    async def snapshot(self, sandbox_id, name, how):
        self.asked.append((name, how))
        return SnapshotInfo("tpl", "b", (f"{name}:default",) if name else (), sandbox_id, NOW)

    async def fork(self, sandbox_id, count, seconds):
        self.asked.append((count, seconds))
        return [INFO, InfraError("no slot", code="no_slots")][:count]

    async def snapshots(self, sandbox_id=None, name=None):
        made = (NOW - timedelta(minutes=n) for n in range(5))
        return [SnapshotInfo(f"t{n}", f"b{n}", (), ID, at) for n, at in enumerate(made)]


@pytest.fixture
def cluster():
    return Remembering()


@pytest.fixture
async def http(cluster):
    app = FastAPI()
    errors.install(app)
    app.include_router(snapshots.routes(cluster, "n000", None))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://x"
    ) as client:
        yield client


@pytest.mark.parametrize("path", [f"/sandboxes/{ID}/connect", f"/v2/sandboxes/{ID}/connect"])
async def test_connect_tells_running_from_resumed(http, cluster, path):
    running = await http.post(path, json={"timeout": 7})
    assert running.status_code == 200 and "restore" not in running.json()
    cluster.state = State.PAUSED
    resumed = await http.post(path, json={"memory": False})
    assert resumed.status_code == 201 and resumed.json()["restore"]["clock_error_ms"] == 1.5
    assert cluster.asked == [(7, True), (None, False)]


async def test_a_pause_twice_is_a_conflict(http, cluster):
    for body in (None, {}, {"memory": False, "requireHealthyGuest": True}):
        answer = await http.post(f"/sandboxes/{ID}/pause", json=body)
        assert answer.status_code == 204
    assert [(how.memory, how.healthy) for how in cluster.asked] == [
        (True, False), (True, False), (False, True),
    ]  # fmt: skip
    cluster.state = State.PAUSED
    assert (await http.post(f"/sandboxes/{ID}/pause")).status_code == 409


async def test_resume_is_for_paused_ones(http, cluster):
    assert (await http.post(f"/sandboxes/{ID}/resume")).status_code == 409
    cluster.state = State.PAUSED
    assert (await http.post(f"/sandboxes/{ID}/resume", json={"timeout": 5})).status_code == 201


async def test_each_fork_is_a_sandbox_or_an_error(http, cluster):
    answer = await http.post(f"/sandboxes/{ID}/fork", json={"count": 2, "timeout": 9})
    first, second = answer.json()
    assert answer.status_code == 201 and first["sandbox"]["envdAccessToken"] == "tok"
    assert second["error"] == {"code": 503, "message": "no slot", "error_code": "no_slots"}
    assert len((await http.post(f"/sandboxes/{ID}/fork")).json()) == 1
    assert cluster.asked == [(2, 9), (1, None)]


async def test_a_snapshot_is_answered_as_e2b_does(http):
    named = await http.post(f"/sandboxes/{ID}/snapshots", json={"name": "saved"})
    assert named.status_code == 201
    assert (named.json()["snapshotID"], named.json()["names"]) == (
        "saved:default",
        ["saved:default"],
    )
    assert (await http.post(f"/sandboxes/{ID}/snapshots")).json()["snapshotID"] == "tpl:default"


async def test_lists_are_cut_into_pages(http):
    seen, token = [], ""
    while True:
        query = {"limit": 2} | ({"nextToken": token} if token else {})
        answer = await http.get("/snapshots", params=query)
        seen += [each["templateID"] for each in answer.json()]
        token = answer.headers.get("X-Next-Token", "")
        if not token:
            break
    assert seen == ["t0", "t1", "t2", "t3", "t4"]
    assert (await http.get("/snapshots", params={"nextToken": "x"})).status_code == 400
