"""Codes and bodies of the HTTP face, with a cluster that only remembers."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from agentenv.api.app import create_app
from agentenv.errors import GuestError, ImageError, InfraError, NotFound
from agentenv.model import Guest, Resources, new_id
from agentenv.sandbox.logs import entries
from agentenv.sandbox.metrics import Sample
from agentenv.sandbox.record import SandboxInfo
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
            network=request.network, traffic_token=None if request.network.public else "traffic",
            idempotency=request.idempotency,
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

    async def connect(self, sandbox_id, seconds, *, memory=True):
        return await self.get(sandbox_id), False

    async def nodes(self):
        return []

    async def set_network(self, sandbox_id, internet, allow, deny):
        info = await self.get(sandbox_id)
        policy = replace(info.network, internet=internet, allow_out=allow, deny_out=deny)
        self.made[sandbox_id] = replace(info, network=policy)

    async def metrics(self, sandbox_id, start, end):
        await self.get(sandbox_id)
        return [Sample(1000.5, 12.5, 1, 1, 2, 3, 4, 5)] if start <= 1000.5 <= end else []

    async def logs(self, sandbox_id):
        info = await self.get(sandbox_id)
        return entries(info, ["[    1.5] first", "[    2.5] agentenv-init: fatal: second"])


@pytest.fixture
def cluster():
    return Remembering()


@pytest.fixture
async def http(cluster):
    app = create_app(cluster, None, key=KEY, node="n000", domain=None)
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
        {"templateID": "base", "autoPauseMemory": False},
        {"templateID": "base", "autoPause": 3},
        {"templateID": "base", "mcp": {"a": {}}},
        {"templateID": "base", "network": {"allowOut": ["example.org"]}},
        {"templateID": "base", "network": {"denyOut": ["1.1.1.1/40"]}},
        {"templateID": "base", "network": {"rules": {"a": []}}},
        {"templateID": "base", "network": {"egressProxy": {"address": "x:1"}}},
        {"templateID": "base", "network": {"maskRequestHost": "a\r\nb"}},
        {"templateID": "base", "network": []},
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


@pytest.mark.parametrize(
    ("method", "headers", "again"),
    [
        ("GET", {}, "true"),
        ("DELETE", {}, "true"),
        ("POST", {}, "false"),
        ("POST", {"Idempotency-Key": "k"}, "true"),
    ],
)
async def test_sdks_are_told_whether_to_send_again(http, cluster, method, headers, again):
    async def busy(*_):
        raise InfraError("the data plane is away", code="edge_down")

    cluster.list = cluster.kill = cluster.create = busy
    path = {"GET": "/v2/sandboxes", "DELETE": "/sandboxes/x", "POST": "/v2/sandboxes"}[method]
    body = {"templateID": "base"} if method == "POST" else None
    answer = await http.request(method, path, json=body, headers=headers)
    assert (answer.status_code, answer.headers["should-retry"]) == (503, again)
    assert answer.headers.get("retry-after") == ("1" if again == "true" else None)


async def made(http, **fields):
    answer = await http.post("/v2/sandboxes", json={"templateID": "base", **fields})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_the_network_is_read_back_and_replaced(http):
    network = {
        "allowOut": ["8.8.8.8"], "denyOut": ["0.0.0.0/0"], "allowPublicTraffic": False,
        "maskRequestHost": "localhost:${PORT}",
    }  # fmt: skip
    sandbox = await made(http, network=network)
    path = f"/sandboxes/{sandbox['sandboxID']}"
    assert sandbox["trafficAccessToken"] == "traffic"
    assert (await http.get(path)).json()["network"] == {**network, "allowOut": ["8.8.8.8/32"]}
    changed = await http.put(f"{path}/network", json={"denyOut": ["1.1.1.1"]})
    assert changed.status_code == 204
    detail = (await http.get(path)).json()
    assert detail["network"] == {
        **network, "allowOut": [], "denyOut": ["1.1.1.1/32"],
    }  # fmt: skip
    assert (
        await http.put(f"{path}/network", json={"allow_internet_access": False})
    ).status_code == 204
    assert (await http.get(path)).json()["allowInternetAccess"] is False
    assert (await http.put(f"{path}/network", json={})).status_code == 204
    assert (await http.get(path)).json()["allowInternetAccess"] is True
    for bad in (
        {"allowOut": ["x y"]}, {"rules": {"a": []}}, {"allowOut": "1.1.1.1"}, {"allowPublicTraffic": True},
    ):  # fmt: skip
        assert (await http.put(f"{path}/network", json=bad)).status_code == 400
    assert (await http.put("/sandboxes/none/network", json={})).status_code == 404


async def test_private_ports_need_a_secure_sandbox(http):
    body = {"templateID": "base", "network": {"allowPublicTraffic": False}}
    assert (await http.post("/sandboxes", json=body)).status_code == 400
    assert (await http.post("/sandboxes", json={**body, "secure": True})).status_code == 201


async def test_metrics_are_those_asked_for(http):
    sandbox_id = (await made(http))["sandboxID"]
    (found,) = (await http.get(f"/sandboxes/{sandbox_id}/metrics")).json()
    assert found == {
        "timestamp": "1970-01-01T00:16:40.500000+00:00", "timestampUnix": 1000, "cpuCount": 1,
        "cpuUsedPct": 12.5, "memUsed": 1, "memTotal": 2, "memCache": 3, "diskUsed": 4, "diskTotal": 5,
    }  # fmt: skip
    assert (await http.get(f"/sandboxes/{sandbox_id}/metrics?start=1001")).json() == []
    assert (await http.get(f"/sandboxes/{sandbox_id}/metrics?end=1000")).json() == []
    many = await http.get(f"/sandboxes/metrics?sandbox_ids={sandbox_id},none")
    assert many.json() == {"sandboxes": {sandbox_id: found}}
    for bad in ("start=-1", "start=x", f"end={10**30}"):
        assert (await http.get(f"/sandboxes/{sandbox_id}/metrics?{bad}")).status_code == 400


async def test_logs_of_both_generations(http):
    sandbox_id = (await made(http))["sandboxID"]
    old = (await http.get(f"/sandboxes/{sandbox_id}/logs")).json()
    assert [entry["line"] for entry in old["logs"]][1:] == ["first", "agentenv-init: fatal: second"]
    assert len(old["logEntries"]) == 3
    new = f"/v2/sandboxes/{sandbox_id}/logs"
    first = (await http.get(f"{new}?direction=backward&limit=1")).json()["logs"]
    assert [(e["level"], e["message"]) for e in first] == [
        ("error", "agentenv-init: fatal: second")
    ]
    assert len((await http.get(f"{new}?level=error")).json()["logs"]) == 1
    assert len((await http.get(f"{new}?search=FIRST")).json()["logs"]) == 1
    assert (await http.get(f"{new}?cursor={4 * 10**12}")).json() == {"logs": []}
    for bad in ("level=x", "direction=up", "limit=0", "cursor=-1"):
        assert (await http.get(f"{new}?{bad}")).status_code == 400


async def test_a_key_is_passed_on_with_what_was_asked(http, cluster):
    async def send(key, **fields):
        body = {"templateID": "base", **fields}
        return await http.post("/v2/sandboxes", json=body, headers={"Idempotency-Key": key})

    first, again, other = await send("k-1"), await send("k-1"), await send("k-1", timeout=5)
    keys = [
        cluster.made[answer.json()["sandboxID"]].idempotency for answer in (first, again, other)
    ]
    assert keys[0] == keys[1] != keys[2] and {key.key for key in keys} == {"k-1"}
    for bad in ("", "A b", "x" * 256):
        assert (await send(bad)).status_code == 400
