"""What a careless or hostile user sends to the in-guest API: a true answer, and the agent lives."""

import concurrent.futures

import httpx
import pytest
from tests.integration.node.test_sandboxes import sh


@pytest.fixture(scope="module")
def guest(server):
    made = server.create("base", timeout=900)
    headers = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
        client.id = made["sandboxID"]
        yield client
    server.cli("kill", made["sandboxID"], check=True)


def call(guest, method, **message):
    return guest.post(f"/filesystem.Filesystem/{method}", json=message)


def test_a_deep_path_is_made_and_removed(guest):
    deep = "/tmp/deep/" + "d/" * 1500
    assert call(guest, "MakeDir", path=deep).status_code == 200
    assert call(guest, "ListDir", path="/tmp/deep", depth=2000).status_code == 200
    assert call(guest, "Remove", path="/tmp/deep").status_code == 200
    answer = guest.post(f"/files?path={'a/' * 2000}b", content=b"x",
                        headers={"Content-Type": "application/octet-stream"})  # fmt: skip
    assert answer.status_code == 200, answer.text


def test_pipes_are_refused_however_many_ask(server, guest):
    sh(server, guest.id, "mkfifo /tmp/pipe", check=True)
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        reads = pool.map(lambda _: guest.get("/files?path=/tmp/pipe").status_code, range(20))
        assert set(reads) == {400}
    write = guest.post("/files?path=/tmp/pipe", content=b"x",
                       headers={"Content-Type": "application/octet-stream"})  # fmt: skip
    assert write.status_code == 400
    assert call(guest, "Stat", path="/tmp").status_code == 200


@pytest.mark.parametrize(
    ("method", "message", "status", "code"),
    [
        ("MakeDir", {"path": "/etc/passwd/x"}, 400, "invalid_argument"),
        ("Move", {"source": "/tmp", "destination": "/tmp/a/b"}, 400, "invalid_argument"),
        ("Move", {"source": "/proc", "destination": "/x"}, 400, "failed_precondition"),
        ("Move", {"source": "", "destination": "/x"}, 400, "invalid_argument"),
        ("Move", {"source": "/none", "destination": "/x"}, 404, "not_found"),
        ("Remove", {"path": "/"}, 400, "invalid_argument"),
        ("Remove", {"path": ""}, 400, "invalid_argument"),
        ("Remove", {"path": "/dev"}, 400, "failed_precondition"),
        ("Stat", {"path": "/" + "x" * 5000}, 400, "invalid_argument"),
        ("Stat", {"path": "/" + "x" * 300}, 400, "invalid_argument"),
        ("Stat", {"path": "a\0b"}, 400, "invalid_argument"),
        ("Stat", {"path": 7}, 400, "invalid_argument"),
        ("Nonsense", {}, 501, "unimplemented"),
    ],
)
def test_mistakes_are_the_callers(guest, method, message, status, code):
    answer = call(guest, method, **message)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


@pytest.mark.parametrize("path", ["/etc/passwd/x", "/proc/x", "/" + "x/" * 3000, "/tmp"])
def test_uploads_to_where_nothing_can_be(guest, path):
    answer = guest.post("/files", params={"path": path}, content=b"x",
                        headers={"Content-Type": "application/octet-stream"})  # fmt: skip
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "body", [b"", b"\0", b"\0\0\0\0\x05{}", b"\xff" * 40, b"\0\xff\xff\xff\xff{}"]
)
def test_malformed_envelopes_end_their_stream_and_nothing_else(guest, body):
    answer = guest.post("/process.Process/Start", content=body,
                        headers={"Content-Type": "application/connect+json"})  # fmt: skip
    assert answer.status_code == 200 and b"invalid_argument" in answer.content
    assert guest.get("/health").status_code == 204


def test_the_root_survived(server, guest):
    assert sh(server, guest.id, "echo $$ && ls /").returncode == 0


def test_what_this_version_lacks_is_refused_by_name(server, guest):
    answer = server.api("POST", f"/sandboxes/{guest.id}/collapse", json={})
    assert (answer.status_code, answer.json()["error_code"]) == (501, "not_supported")
    missing = server.api("POST", f"/sandboxes/{'a' * 20}/collapse")
    assert missing.status_code == 404
