"""A sandbox's pauses and copies, asked through the routes that answer them. The rest: an agent's
tests (tests/integration/agent/test_sdk.py)."""

from datetime import UTC, datetime

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api import errors, sandboxes
from agentenv.cluster.contract import SnapshotInfo
from agentenv.errors import Conflict, InfraError
from agentenv.model import Guest, Resources
from agentenv.sandbox.record import Lifecycle, SandboxInfo
from agentenv.sandbox.state import State
from agentenv.sdk.sandbox import AgentEnv, Sandbox

ID, NOW = "s" * 20, datetime(2026, 12, 2, tzinfo=UTC)
INFO = SandboxInfo(
    ID, State.RUNNING, "tpl", "b", "i", NOW, NOW, Resources(1), Guest(), access_token="tok"
)


class Remembering:
    """A sandbox that runs or is paused, and what was asked of it."""

    def __init__(self):
        self.asked, self.info = [], INFO

    async def create(self, request):
        self.asked.append(request.lifecycle)
        return self.info

    async def get(self, sandbox_id):
        return self.info

    async def pause(self, sandbox_id, how):
        if self.info.state is State.PAUSED:
            raise Conflict("it is paused", state="paused")
        self.asked.append(how.memory)
        self.info = INFO.with_(state=State.PAUSED)

    async def connect(self, sandbox_id, seconds, *, memory=True):
        self.asked.append((seconds, memory))
        was, self.info = self.info.state, INFO
        return INFO, was is State.PAUSED

    async def snapshot(self, sandbox_id, name, how):
        self.asked.append((name, how.memory))
        return SnapshotInfo("tpl", "b", (f"{name}:default",) if name else (), sandbox_id, NOW)

    async def snapshots(self, sandbox_id=None, name=None):
        self.asked.append((sandbox_id, name))
        return [SnapshotInfo(f"t{n}", f"b{n:03}", (), ID, NOW) for n in reversed(range(130))]

    async def fork(self, sandbox_id, count, seconds):
        self.asked.append((count, seconds))
        return [INFO.with_(id="c" * 20), InfraError("no slot", code="no_slots")][:count]


@pytest.fixture
def cluster():
    return Remembering()


@pytest.fixture
async def env(cluster):
    app = FastAPI()
    errors.install(app)
    app.include_router(sandboxes.routes(cluster, "n000", None))
    async with AgentEnv("http://x", "key") as env:
        await env.http.aclose()
        env.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x")
        yield env


async def test_what_happens_at_the_deadline_is_chosen_at_the_start(env, cluster):
    await env.start("base")
    await env.start("base", auto_pause=True, auto_resume=True)
    await env.start("base", auto_pause=True, auto_pause_memory=False)
    assert cluster.asked == [
        Lifecycle(), Lifecycle(pause=True, resume=True), Lifecycle(pause=True, memory=False),
    ]  # fmt: skip


async def test_pause_and_resume(env, cluster):
    sandbox = await env.open(ID)
    await sandbox.pause()
    with pytest.raises(Conflict) as twice:
        await sandbox.pause()
    assert twice.value.details == {"state": "paused"}
    assert await sandbox.resume(60) and not await sandbox.resume()
    await sandbox.pause(memory=False)
    again = await env.resume(ID, memory=False)
    assert again.id == ID
    assert cluster.asked == [True, (60, True), (None, True), False, (None, False)]


async def test_snapshots_are_templates(env, cluster):
    sandbox = await env.open(ID)
    assert await sandbox.snapshot("saved") == "saved:default"
    assert await sandbox.snapshot(memory=False) == "tpl:default"
    found = await env.snapshots(sandbox_id=ID, name="saved")
    assert len(found) == len({each["buildID"] for each in found}) == 130
    assert cluster.asked[:3] == [("saved", True), (None, False), (ID, "saved")]


async def test_each_fork_is_a_sandbox_or_its_error(env, cluster):
    sandbox = await env.open(ID)
    copy, failed = await sandbox.fork(2, timeout=9)
    assert isinstance(copy, Sandbox) and copy.id == "c" * 20
    assert type(failed) is InfraError and failed.code == "no_slots"
    assert len(await sandbox.fork()) == 1
    assert cluster.asked == [(2, 9), (1, None)]
