"""Builds by steps through the API: their guests, their ends, sizes, registries, what is refused."""

import hashlib
import io
import tarfile

import httpx
import pytest
from tests import corpus
from tests.integration.image import registries
from tests.waiting import until

pytestmark = pytest.mark.both


class Builds:
    """Words with the server about templates; those it made are removed at the end."""

    def __init__(self, server):
        self.server, self.names = server, set()

    def request(self, name, **sizes):
        """Of a new build: the template's id and the build's path."""
        self.names.add(name)
        answer = self.server.api("POST", "/v3/templates", json={"name": name, **sizes})
        assert answer.status_code == 202, answer.text
        made = answer.json()
        return made["templateID"], f"/templates/{made['templateID']}/builds/{made['buildID']}"

    def start(self, path, status=202, **body):
        answer = self.server.api("POST", "/v2" + path, json=body)
        assert answer.status_code == status, answer.text
        return answer

    def status(self, path):
        return self.server.api("GET", path + "/status").json()

    def log(self, path):
        """Every message, page by page, as SDKs read it."""
        said = []
        while page := self.server.api(
            "GET", f"{path}/status", params={"logsOffset": len(said), "limit": 7}
        ).json()["logEntries"]:
            said += page
        return said

    def says(self, path, line):
        until(lambda: any(line == each["message"] for each in self.log(path)), 60)

    def ended(self, path, seconds=120):
        return until(
            lambda: (s := self.status(path))["status"] in ("ready", "error") and s, seconds
        )

    def build(self, name, sizes=None, **body):
        _, path = self.request(name, **(sizes or {}))
        self.start(path, **body)
        return path, self.ended(path)

    def nothing_runs(self):
        load = self.server.api("GET", "/nodes").json()[0]
        return load["running"] == load["load"]["memory_mib"] == 0


@pytest.fixture
def builds(server):
    made = Builds(server)
    assert made.nothing_runs()
    yield made
    for name in made.names:
        server.api("DELETE", f"/templates/{name}")
    assert made.nothing_runs()


def run(command, user=""):
    return {"type": "RUN", "args": [command, user]}


def archive(**files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


def upload(server, template_id, data):
    name = hashlib.sha256(data).hexdigest()
    answer = server.api("GET", f"/templates/{template_id}/files/{name}")
    assert answer.status_code == 201
    put = httpx.put(answer.json()["url"], content=data, trust_env=False, timeout=60)
    assert put.is_success, put.text
    return name


def test_copied_files_users_and_what_is_known_already(server, builds):
    template_id, path = builds.request("steps")
    files = upload(server, template_id, archive(one="1", two="2"))
    answer = server.api("GET", f"/templates/{template_id}/files/{files}").json()
    assert answer["present"] is True
    steps = [
        {"type": "ENV", "args": ["A", "a", "B", "$A$A"]},
        {"type": "WORKDIR", "args": ["/opt/app"]},
        {"type": "COPY", "args": [".", "data/", "daemon:mail", "0640"], "filesHash": files},
        {"type": "USER", "args": ["somebody"]},
        run("echo $B $(id -un) $PWD > ~/said"),
        run("id -gn > /tmp/group", "daemon:mail"),
    ]
    builds.start(path, fromTemplate="base", steps=steps)
    builds.start(path, 409, fromTemplate="base")  # it is under way
    assert builds.ended(path)["status"] == "ready", builds.log(path)
    script = (
        "cat ~/said /tmp/group; stat -c '%U:%G %a' data/one; id -un; sudo -n id -un 2>&1 | tail -1"
    )
    done = server.cli("run", "steps", "--", "/bin/bash", "-c", script, check=True)
    lines = done.stdout.decode().splitlines()
    assert lines[:4] == ["aa somebody /opt/app", "mail", "daemon:mail 640", "somebody"]

    _, again = builds.request("steps-too")
    builds.start(again, fromTemplate="base", steps=[*steps, run("echo new", "root")])
    assert builds.ended(again)["status"] == "ready"
    said = [each["message"] for each in builds.log(again)]
    assert sum(line.startswith("CACHED") for line in said) == len(steps) and "new" in said
    assert not any(line.startswith("CACHED") for line in [m["message"] for m in builds.log(path)])


def test_a_step_that_fails_is_the_reason(builds):
    steps = [run("true", "root"), run("echo one; echo two >&2; exit 9", "root"), run("true")]
    path, found = builds.build("failing", fromTemplate="base", steps=steps)
    reason = found["reason"]
    assert found["status"] == "error" and (reason["step"], reason["exitCode"]) == ("2", 9)
    assert "exit status 9" in reason["message"]
    assert {"one", "two"} <= {each["message"] for each in reason["logEntries"]}
    assert {each["level"] for each in builds.log(path) if each["message"] == "two"} == {"warn"}
    assert not any(each.get("step") == "3" for each in builds.log(path))
    assert builds.nothing_runs()


def test_the_start_command_that_ends_badly_is_the_reason(builds):
    _, found = builds.build("falling", fromTemplate="base", startCmd="exit 5", readyCmd="false")
    assert found["status"] == "error" and found["reason"]["step"] == "finalize"
    assert found["reason"]["exitCode"] == 5


def test_a_cancelled_build_leaves_nothing(server, builds):
    _, path = builds.request("cancelled")
    builds.start(path, fromTemplate="base", steps=[run("echo begun; exec sleep 1000", "root")])
    builds.says(path, "begun")
    assert server.api("GET", "/v2/sandboxes").json() == []  # nobody's sandbox
    assert server.api("DELETE", path).status_code == 204
    assert builds.nothing_runs()
    found = builds.status(path)
    assert (found["status"], found["reason"]["message"]) == ("error", "the build was cancelled")
    assert server.api("DELETE", path).status_code == 409
    assert server.api("POST", "/v2/sandboxes", json={"templateID": "cancelled"}).status_code == 404


def test_a_server_killed_in_the_middle_says_so_afterwards(server, builds):
    """The session's server is killed: its sandboxes live through it."""
    _, path = builds.request("cut")
    builds.start(path, fromTemplate="base", steps=[run("echo begun; exec sleep 1000", "root")])
    builds.says(path, "begun")
    server.kill()
    server.start()
    found = builds.status(path)
    assert (found["status"], found["reason"]["message"]) == ("error", "the server was restarted")
    assert builds.nothing_runs() and "begun" in [each["message"] for each in builds.log(path)]
    _, again = builds.build("cut", fromTemplate="base", steps=[run("true", "root")])
    assert again["status"] == "ready"


def test_another_size_begins_from_the_disk(server, builds):
    start = {"startCmd": "echo up > /tmp/up; exec sleep 100000", "readyCmd": "test -e /tmp/up"}
    keep = [run("echo kept > /opt/kept; sync", "root")]
    _, found = builds.build("small", fromTemplate="base", steps=keep, **start)
    assert found["status"] == "ready"
    sizes = {"memoryMB": 768, "cpuCount": 1}
    _, found = builds.build("large", sizes, fromTemplate="small", steps=[run("cat /opt/kept")])
    assert found["status"] == "ready", found["reason"]
    script = "cat /opt/kept; awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo; pgrep -fc '[s]leep 1000'"
    done = server.cli("run", "large", "--", "/bin/sh", "-c", script)
    kept, memory, running = done.stdout.decode().split()
    assert kept == "kept" and 600 < int(memory) <= 768 and running == "0"


@pytest.mark.full
def test_an_image_of_a_private_registry(server, builds, tmp_path):
    layer = corpus.Layer().folder("bin").folder("etc")
    with open("/bin/busybox", "rb") as program:
        layer.add("bin/busybox", data=program.read(), mode=0o755)
    for tool in ("sh", "cat"):
        layer.symlink(f"bin/{tool}", "busybox")
    corpus.write(tmp_path / "layout", [layer], {"Env": ["PATH=/bin"]})
    with registries.real(tmp_path / "registry", auth=True) as registry:
        registry.push(tmp_path / "layout", "team/app")
        image = f"{registry.host}/team/app"
        steps = [{"type": "ENV", "args": ["FROM", "here"]}, {"type": "WORKDIR", "args": ["/srv/x"]}]
        _, found = builds.build("refused", fromImage=image, steps=steps)
        assert found["reason"]["step"] == "base" and "login" in found["reason"]["message"]
        login = {"type": "registry", "username": registries.USER, "password": registries.PASSWORD}
        path, found = builds.build("private", fromImage=image, fromImageRegistry=login, steps=steps)
        assert found["status"] == "ready", found["reason"]
    assert registries.PASSWORD not in str(builds.log(path)) + server.log.read_text()
    done = server.cli("run", "private", "--", "sh", "-c", "echo $FROM $PWD", check=True)
    assert done.stdout.decode().split() == ["here", "/srv/x"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"fromImage": "a", "fromTemplate": "b"},
        {"fromTemplate": "base", "steps": [{"type": "JUMP", "args": []}]},
        {"fromTemplate": "base", "steps": [{"type": "COPY", "args": ["a", "b"], "filesHash": "x"}]},
        {"fromTemplate": "base", "steps": "none"},
        {"fromImage": "x", "fromImageRegistry": {"type": "aws"}},
        {"fromImage": "x", "fromImageRegistry": {"type": "gcp", "serviceAccountJson": "{}"}},
    ],
)
def test_what_cannot_be_built_is_refused_at_once(builds, body):
    _, path = builds.request("refused")
    builds.start(path, 400, **body)
    assert builds.status(path)["status"] == "waiting"


@pytest.mark.parametrize(
    ("steps", "step"),
    [
        ([{"type": "ENV", "args": ["A"]}], "base"),
        ([{"type": "COPY", "args": ["a", "b"]}], "base"),
        ([{"type": "COPY", "args": ["a", "b"], "filesHash": "0" * 64}], "1"),
        ([run("true\0", "root")], "base"),
    ],
)
def test_steps_that_mean_nothing_are_told(builds, steps, step):
    _, found = builds.build("senseless", fromTemplate="base", steps=steps)
    assert found["status"] == "error" and found["reason"]["step"] == step, found


def test_uploads_need_their_address(server, builds):
    template_id, _ = builds.request("uploads")
    name = "ab" * 32
    url = server.api("GET", f"/templates/{template_id}/files/{name}").json()["url"]
    for bad in (url.replace(name, "cd" * 32), url.split("?")[0], url[:-1]):
        assert httpx.put(bad, content=b"x", trust_env=False).status_code in (400, 401)
    assert server.api("GET", f"/templates/{template_id}/files/{name}").json()["present"] is False
