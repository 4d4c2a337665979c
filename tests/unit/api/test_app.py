"""Codes and bodies of the HTTP face, with a cluster that only remembers."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from agentenv.api.app import create_app
from agentenv.errors import GuestError, ImageError, InfraError, NotFound
from agentenv.model import Resources, new_id
from agentenv.sandbox.record import Guest, SandboxInfo
from agentenv.sandbox.state import State

KEY = "e2b_" + "0" * 40


class Remembering:
    """The cluster contract over a dictionary: enough to see what HTTP makes of it."""

    def __init__(self):
        self.made: dict[str, SandboxInfo] = {}
        self.failure: Exception | None = None

    async def create(self, request):
        if self.failure:
            raise self.failure
        if request.template != "base":
            raise NotFound("template not found", code="template_not_found")
        now = datetime.now(UTC)
        info = SandboxInfo(
            new_id("n000"), State.RUNNING, "tpl", "b", "i", now,
            now + timedelta(seconds=request.timeout or 300), Resources(1), Guest(request.env),
            alias="base", access_token="tok" if request.secure else None, metadata=request.metadata,
            allow_internet=request.allow_internet,
        )  # fmt: skip
        self.made[info.id] = info
        return info

    async def get(self, sandbox_id):
        if sandbox_id not in self.made:
            raise NotFound(f"sandbox '{sandbox_id}' not found", code="sandbox_not_found")
        return self.made[sandbox_id]

    async def list(self):
        return list(self.made.values())

    async def kill(self, sandbox_id):
        await self.get(sandbox_id)
        del self.made[sandbox_id]

    async def set_timeout(self, sandbox_id, seconds):
        info = await self.get(sandbox_id)
        self.made[sandbox_id] = replace(info, end_at=datetime.now(UTC) + timedelta(seconds=seconds))
        return self.made[sandbox_id]

    async def connect(self, sandbox_id, seconds):
        return await self.get(sandbox_id)

    async def nodes(self):
        return []


@pytest.fixture
def cluster():
    return Remembering()


@pytest.fixture
async def http(cluster):
    app = create_app(cluster, key=KEY, node="n000", domain=None)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://x", headers={"X-API-Key": KEY}
    ) as client:
        yield client


async def test_health_needs_no_key_and_all_else_does(http):
    assert (await http.get("/health", headers={"X-API-Key": ""})).status_code == 200
    for key in ("", "wrong"):
        answer = await http.get("/v2/sandboxes", headers={"X-API-Key": key})
        assert answer.status_code == 401
        assert answer.json()["code"] == 401 and answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "body", "token"),
    [
        ("/v2/sandboxes", {"templateID": "base"}, "tok"),
        ("/sandboxes", {"templateID": "base", "secure": True, "timeout": 300}, "tok"),
        ("/sandboxes", {"templateID": "base"}, None),
    ],
)
async def test_create_answers_what_sdks_parse(http, path, body, token):
    answer = await http.post(path, json=body)
    assert answer.status_code == 201
    made = answer.json()
    assert re.fullmatch("[a-z0-9]{20}", made["sandboxID"]) and made["envdVersion"] == "0.6.13"
    assert made["envdAccessToken"] == token and {"templateID", "clientID"} <= made.keys()


async def test_the_life_of_a_sandbox_in_codes(http):
    body = {"templateID": "base", "metadata": {"a": "b c"}, "allow_internet_access": False}
    sandbox_id = (await http.post("/v2/sandboxes", json=body)).json()["sandboxID"]
    detail = (await http.get(f"/sandboxes/{sandbox_id}")).json()
    assert detail["state"] == "running" and detail["allowInternetAccess"] is False
    listed = await http.get("/v2/sandboxes?metadata=a%3Db%252520c")
    assert [s["sandboxID"] for s in listed.json()] == [sandbox_id]
    assert listed.headers["x-total-running"] == "1" and "x-next-token" not in listed.headers
    assert (await http.get("/v2/sandboxes?metadata=a%3Dother")).json() == []
    for path in ("/sandboxes", "/v2/sandboxes"):
        assert (await http.post(f"{path}/{sandbox_id}/connect")).status_code == 200
    timeout = f"/sandboxes/{sandbox_id}/timeout"
    assert (await http.post(timeout, json={"timeout": 5})).status_code == 204
    assert (await http.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    assert (await http.delete(f"/sandboxes/{sandbox_id}")).status_code == 404
    assert (await http.post(timeout, json={"timeout": 5})).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"templateID": ""},
        {"templateID": "base", "timeout": 0},
        {"templateID": "base", "timeout": 10**9},
        {"templateID": "base", "metadata": {"a": 1}},
        {"templateID": "base", "memoryMB": 1},
        {"templateID": "base", "autoPause": True},
        {"templateID": "base", "network": {"allowOut": ["1.1.1.1"]}},
        [],
        "base",
    ],
)
async def test_bad_bodies_are_400_with_a_message(http, body):
    answer = await http.post("/v2/sandboxes", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == 400 and answer.json()["message"]


async def test_no_json_and_no_route_are_answered_in_the_same_shape(http):
    headers = {"Content-Type": "application/json"}
    assert (await http.post("/v2/sandboxes", content=b"{", headers=headers)).status_code == 400
    lost = await http.get("/no/such")
    assert lost.status_code == 404 and "no such route" in lost.json()["message"]
    assert (await http.put("/v2/sandboxes")).status_code == 405
    assert (await http.get("/v2/sandboxes?limit=0")).status_code == 400
    assert (await http.get("/v2/sandboxes?nextToken=%00")).status_code == 400


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (ImageError("bad layer"), 422, "image_invalid"),
        (GuestError("panic", code="guest_boot_failed"), 500, "guest_boot_failed"),
        (InfraError("disk full", code="disk_full"), 503, "disk_full"),
        (RuntimeError("secret detail"), 500, "internal"),
    ],
)
async def test_each_kind_of_failure_has_its_code(http, cluster, failure, status, code):
    cluster.failure = failure
    answer = await http.post("/v2/sandboxes", json={"templateID": "base"})
    assert (answer.status_code, answer.json()["error_code"]) == (status, code)
    assert answer.headers["should-retry"] == "false"
    assert "secret" not in answer.text
