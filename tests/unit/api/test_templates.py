"""Template routes as SDKs see them, over builds whose guests only remember."""

import re
import uuid
from urllib.parse import urlsplit

import httpx
import pytest
from tests.building import building

from agentenv.api.app import create_app
from agentenv.cluster.templates import LocalTemplates

KEY = "e2b_" + "0" * 40
HASH = "a" * 64
RUN = {"type": "RUN", "args": ["touch /a"]}


@pytest.fixture
async def site(tmp_path):
    async with building(tmp_path) as made:
        yield made


@pytest.fixture
async def http(site):
    app = create_app(
        None, LocalTemplates(site.records, site.builds), key=KEY, node="n", domain=None
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://x", headers={"X-API-Key": KEY}
    ) as client:
        yield client


async def requested(http, **body) -> dict:
    answer = await http.post("/v3/templates", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()


async def built(http, site, name="made", **body) -> dict:
    made = await requested(http, name=name)
    path = f"/v2/templates/{made['templateID']}/builds/{made['buildID']}"
    answer = await http.post(path, json={"fromImage": "debian", "steps": [RUN], **body})
    assert (answer.status_code, answer.content) == (202, b""), answer.text
    await site.ended(await site.records.build(made["buildID"]))
    return made


async def test_a_build_from_request_to_its_last_log_line(http, site):
    made = await requested(http, name="Team/Made:v1", tags=["v2"], cpuCount=2, memoryMB=1024)
    assert made.keys() == {"templateID", "buildID", "public", "names", "tags", "aliases"}
    assert (made["names"], made["tags"]) == (["team/made"], ["v1", "v2"])
    assert made["aliases"] == ["made"] and uuid.UUID(made["buildID"])
    status = f"/templates/{made['templateID']}/builds/{made['buildID']}/status"
    waiting = (await http.get(status)).json()
    assert (waiting["status"], waiting["logs"], waiting["logEntries"]) == ("waiting", [], [])
    begin = f"/v2/templates/{made['templateID']}/builds/{made['buildID']}"
    assert (await http.post(begin, json={"fromImage": "d", "steps": [RUN]})).status_code == 202
    assert (await http.get(status)).json()["status"] in ("building", "ready")
    await site.ended(await site.records.build(made["buildID"]))
    found = (await http.get(status)).json()
    assert found["status"] == "ready" and "reason" not in found
    entry = next(e for e in found["logEntries"] if e.get("step") == "1")
    assert entry["message"] == "[1/1] RUN touch /a" and entry["level"] == "info"
    total = len(found["logEntries"])
    assert (await http.get(f"{status}?logsOffset={total}")).json()["logEntries"] == []
    assert len((await http.get(f"{status}?limit=1")).json()["logEntries"]) == 1
    logs = await http.get(status.replace("status", "logs"))
    assert len(logs.json()["logs"]) == total


async def test_a_failure_is_told_with_step_output_and_exit_code(http, site):
    made = await built(http, site, steps=[{"type": "RUN", "args": ["fail 3"]}])
    status = f"/templates/{made['templateID']}/builds/{made['buildID']}/status"
    reason = (await http.get(status)).json()["reason"]
    assert reason["message"] == "failed to run command 'fail 3': command failed: exit status 3"
    assert (reason["step"], reason["exitCode"]) == ("1", 3)
    assert "it went wrong" in [entry["message"] for entry in reason["logEntries"]]


async def test_files_are_put_where_the_answer_says_without_a_key(http):
    made = await requested(http, name="made")
    path = f"/templates/{made['templateID']}/files/{HASH}"
    answer = await http.get(path)
    assert answer.status_code == 201 and answer.json()["present"] is False
    url = urlsplit(answer.json()["url"])
    assert (url.scheme, url.netloc) == ("http", "x")
    target = f"{url.path}?{url.query}"
    for wrong in (target[:-1], re.sub("until=.", "until=9", target), target.replace("aa", "bb", 1)):
        assert (await http.put(wrong, content=b"x", headers={"X-API-Key": ""})).status_code == 401
    put = await http.put(target, content=b"data", headers={"X-API-Key": ""})
    assert put.is_success
    assert (await http.get(path)).json()["present"] is True
    over = await http.put(target, content=bytes((1 << 20) + 1))
    assert (over.status_code, over.json()["error_code"]) == (413, "upload_too_large")
    assert (await http.get(path.replace(HASH, "nonsense"))).status_code == 400


async def test_names_with_a_slash_are_one_segment(http, site):
    await built(http, site, name="team/made:v1")
    for path in ("/templates/aliases/team%2Fmade", "/templates/team%2Fmade"):
        assert (await http.get(path)).status_code == 200
    (tag,) = (await http.get("/templates/team%2Fmade/tags")).json()
    assert tag["tag"] == "v1" and uuid.UUID(tag["buildID"]) and tag["createdAt"]
    assert (await http.delete("/templates/team%2Fmade%3Av1")).status_code == 204
    assert (await http.delete("/templates/team%2Fmade%3Av1")).status_code == 404
    assert (await http.get("/templates/aliases/team%2Fmade")).status_code == 404


async def test_tags_are_given_and_taken(http, site):
    made = await built(http, site)
    body = {"target": "made:default", "tags": ["v1", "made:prod"]}
    answer = await http.post("/templates/tags", json=body)
    assert answer.status_code == 201
    assert answer.json() == {"tags": ["v1", "prod"], "buildID": made["buildID"]}
    found = {tag["tag"] for tag in (await http.get("/templates/made/tags")).json()}
    assert found == {"default", "v1", "prod"}

    async def untag(name, *tags):
        return await http.request("DELETE", "/templates/tags", json={"name": name, "tags": tags})

    assert (await untag("made", "v1")).status_code == 204
    assert (await untag("made", "v1")).status_code == 404
    assert (await untag("made", "default")).status_code == 400
    assert (await untag("nothing", "v1")).status_code == 404
    for bad in (":x", "made:", "other:x", "A b", made["buildID"]):
        answer = await http.post("/templates/tags", json={"target": "made", "tags": [bad]})
        assert answer.status_code == 400, bad
    for unknown in ("nothing", "made:none"):
        answer = await http.post("/templates/tags", json={"target": unknown, "tags": ["x"]})
        assert answer.status_code == 404


async def test_templates_are_listed_as_e2b_lists_them(http, site):
    made = await built(http, site)
    await requested(http, name="fresh")
    found = {each["names"][0]: each for each in (await http.get("/templates")).json()}
    ready, fresh = found["made"], found["fresh"]
    wanted = {
        "templateID", "buildID", "cpuCount", "memoryMB", "diskSizeMB", "public", "aliases", "names",
        "createdAt", "updatedAt", "createdBy", "lastSpawnedAt", "spawnCount", "buildCount",
        "envdVersion", "buildStatus",
    }  # fmt: skip
    assert wanted <= ready.keys() and wanted <= fresh.keys()
    assert (ready["cpuCount"], ready["memoryMB"], ready["buildStatus"]) == (1, 512, "ready")
    assert fresh["buildStatus"] == "waiting"
    detail = (await http.get(f"/templates/{made['templateID']}")).json()
    assert [each["status"] for each in detail["builds"]] == ["ready"]
    answer = await http.patch("/v2/templates/made", json={"public": True})
    assert answer.json() == {"names": ["made"]}
    assert (await http.get("/templates/aliases/made")).json()["public"] is True


async def test_a_build_can_be_cancelled(http, site):
    made = await requested(http, name="made")
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
    blocked = {"fromImage": "d", "steps": [{"type": "RUN", "args": ["block"]}]}
    await http.post(f"/v2{path}", json=blocked)
    await site.yard.blocked.wait()
    assert (await http.get(f"{path}/status")).json()["status"] == "building"
    assert (await http.post(f"/v2{path}", json=blocked)).status_code == 409
    assert (await http.delete(path)).status_code == 204
    found = (await http.get(f"{path}/status")).json()
    assert (found["status"], found["reason"]["message"]) == ("error", "the build was cancelled")
    assert (await http.delete(path)).status_code == 409


async def test_a_dockerfiles_stages_are_taken_as_well(http, site):
    stages = [
        {"name": "one", "base": {"kind": "name", "name": "d"}, "steps": [RUN]},
        {
            "name": "two",
            "base": {"kind": "stage", "name": "one"},
            "steps": [
                {
                    "type": "COPY",
                    "args": ["/a", "/b", "", ""],
                    "fromStage": "one",
                    "keepOwner": True,
                    "escape": "\\",
                }
            ],
        },
    ]
    made = await built(http, site, fromImage=None, steps=[], stages=stages, config={"cmd": ["x"]})
    row = await site.records.build(made["buildID"])
    assert row.status == "ready" and row.doc["config"]["cmd"] == ["x"], row.doc
    assert "/b" in site.yard.snapshots[row.snapshot_id].files


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"fromImage": "d", "fromTemplate": "t"},
        {"fromImage": "d", "steps": [{"type": "NONSENSE", "args": []}]},
        {"fromImage": "d", "steps": [{"type": "COPY", "args": ["a", "b"], "filesHash": "x"}]},
        {"fromImage": "d", "fromImageRegistry": {"type": "aws", "awsRegion": "x"}},
        {"fromImage": "d", "fromImageRegistry": {"type": "gcp"}},
        {"fromImage": "d", "fromImageRegistry": {"type": "other"}},
        {"stages": []},
    ],
)
async def test_bad_recipes_are_refused_before_anything_runs(http, body):
    made = await requested(http, name="made")
    path = f"/v2/templates/{made['templateID']}/builds/{made['buildID']}"
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, 400), answer.text
    status = await http.get(f"{path[3:]}/status")
    assert status.json()["status"] == "waiting"


@pytest.mark.parametrize(
    "body", [{}, {"name": ""}, {"name": "a/b/c"}, {"name": "ok", "cpuCount": 0}, {"name": "a:"}]
)
async def test_bad_requests(http, body):
    answer = await http.post("/v3/templates", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, 400), answer.text


async def test_all_needs_the_key_but_the_upload(http):
    for method, path in (
        ("GET", "/templates"),
        ("POST", "/v3/templates"),
        ("DELETE", "/templates/x"),
    ):
        answer = await http.request(method, path, headers={"X-API-Key": ""})
        assert answer.status_code == 401
