"""What is asked of a running sandbox: network, metrics, logs, repeated requests, its end."""

import concurrent.futures
import json

import httpx
import pytest
from tests.integration.agent.conftest import ended, output, start
from tests.integration.node.test_sandboxes import sh
from tests.waiting import until

from agentenv.sdk import envelope


@pytest.fixture(scope="module")
def made(server):
    sandbox = server.create("base", timeout=900)
    yield sandbox
    server.cli("kill", sandbox["sandboxID"], check=True)


@pytest.fixture(scope="module")
def sandbox(made):
    return made["sandboxID"]


def run(server, made, script, **headers):
    """All messages of a command, as an SDK gets them."""
    headers = {
        "E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"],
        "Content-Type": "application/connect+json", **headers,
    }  # fmt: skip
    answer = httpx.post(
        f"{server.url}/process.Process/Start", content=envelope.encode(start(script)),
        headers=headers, timeout=120, trust_env=False,
    )  # fmt: skip
    return [message for _, message in envelope.Decoder().feed(answer.content)]


@pytest.mark.only("qemu")  # by a cgroup in the guest
def test_a_kill_takes_what_a_command_has_put_aside(server, made, sandbox):
    """A daemon: forked twice, in a session of its own, its parent gone."""
    daemon = "setsid sh -c 'setsid sleep 1234 & ' & wait; exec sleep 60"
    messages = run(server, made, daemon, **{"Connect-Timeout-Ms": "1500"})
    assert messages[-1]["error"]["code"] == "deadline_exceeded"
    until(lambda: sh(server, sandbox, "pgrep -f 'sleep [1]234'").returncode == 1)
    # Of the groups only the one of the command that asks is left.
    listed = sh(server, sandbox, "echo /sys/fs/cgroup/agentenv/*/").stdout.split()
    assert len(listed) == 1


def test_who_leaves_the_group_is_killed_all_the_same(server, made, sandbox):
    """As a service manager in the guest may do with processes."""
    script = "echo $$ > /sys/fs/cgroup/cgroup.procs; sleep 1357 & sleep 2468"
    messages = run(server, made, script, **{"Connect-Timeout-Ms": "1500"})
    assert messages[-1]["error"]["code"] == "deadline_exceeded"
    until(lambda: sh(server, sandbox, "pgrep -f 'sleep [12][34]'").returncode == 1)


def test_watchers_up_to_their_limit(server, made):
    headers = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:

        def call(method, **message):
            return client.post(f"/filesystem.Filesystem/{method}", json=message)

        ids = [call("CreateWatcher", path="/tmp").json()["watcherId"] for _ in range(200)]
        assert all(call("RemoveWatcher", watcherId=found).status_code == 200 for found in ids)


def test_a_daemon_outlives_the_command_that_ended(server, made, sandbox):
    assert ended(run(server, made, "setsid sleep 4321 & exit 0"))["exitCode"] == 0
    assert sh(server, sandbox, "pkill -f 'sleep [4]321'").returncode == 0


@pytest.mark.only("qemu")  # gVisor ends with its limit: tests/integration/gvisor
def test_want_of_memory_is_told_from_failure(server, made):
    eater = "x = []\nwhile True: x.append(b'1' * (1 << 20))"
    messages = run(server, made, f'python3 -c "{eater}"')
    assert ended(messages)["outOfMemory"] is True
    assert "out of memory" in ended(messages)["error"]
    assert "outOfMemory" not in ended(run(server, made, "kill -9 $$"))
    assert output(run(server, made, "echo alive")) == b"alive\n"


def test_metrics_come_by_themselves_and_a_range_is_respected(server, sandbox):
    samples = until(lambda: server.api("GET", f"/sandboxes/{sandbox}/metrics").json())
    assert samples[0]["memTotal"] > samples[0]["memUsed"] > 0 < samples[0]["diskTotal"]
    assert 0 <= samples[0]["cpuUsedPct"] <= 100 and samples[0]["cpuCount"] in (1, 2)
    assert server.api("GET", f"/sandboxes/{sandbox}/metrics?end=1000").json() == []
    many = server.api("GET", f"/sandboxes/metrics?sandbox_ids={sandbox}").json()["sandboxes"]
    assert many[sandbox]["timestampUnix"] >= samples[0]["timestampUnix"]


def test_logs_tell_the_boot(server, sandbox):
    entries = server.api("GET", f"/sandboxes/{sandbox}/logs").json()["logEntries"]
    assert entries[0]["fields"]["source"] == "node"
    times = [entry["timestamp"] for entry in entries]
    assert times == sorted(times)
    found = server.api("GET", f"/v2/sandboxes/{sandbox}/logs?search=listening").json()["logs"]
    assert found[0]["fields"] == {"source": "console"}


def test_the_policy_of_a_running_sandbox_is_replaced(server, sandbox):
    def network():
        return server.api("GET", f"/sandboxes/{sandbox}").json()["network"]

    before = network()
    rules = {"denyOut": ["0.0.0.0/0"], "allowOut": ["192.0.2.1"]}
    assert server.api("PUT", f"/sandboxes/{sandbox}/network", json=rules).status_code == 204
    assert network() == {**before, "denyOut": ["0.0.0.0/0"], "allowOut": ["192.0.2.1/32"]}
    # The look-up is answered by nobody: what is denied asks no questions either.
    script = "timeout 5 python3 -c 'import socket; socket.getaddrinfo(\"example.org\", 80)'"
    assert sh(server, sandbox, script).returncode != 0
    assert server.api("PUT", f"/sandboxes/{sandbox}/network", json={}).status_code == 204
    assert network() == before


def test_a_private_sandbox_shows_its_ports_for_its_token(server):
    network = {"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}"}
    made = server.create("base", timeout=300, network=network)
    try:
        page = "python3 -m http.server 8000 >/dev/null 2>&1 &"
        assert ended(run(server, made, page))["exitCode"] == 0
        headers = {"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "8000"}

        def ask(**more):
            return server.api("GET", "/", headers={**headers, **more}).status_code

        token = {"E2b-Traffic-Access-Token": made["trafficAccessToken"]}
        until(lambda: ask(**token) == 200)
        assert ask() == ask(**{"E2b-Traffic-Access-Token": "wrong"}) == 403
    finally:
        server.cli("kill", made["sandboxID"], check=True)


def test_a_repeated_request_makes_one_sandbox(server):
    key = {"Idempotency-Key": "once-and-only"}

    def create(**fields):
        body = {"templateID": "base", "timeout": 300, **fields}
        return server.api("POST", "/v2/sandboxes", json=body, headers=key)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = [answer.result() for answer in [pool.submit(create) for _ in range(3)]]
    (sandbox_id,) = {answer.json()["sandboxID"] for answer in answers}
    other = create(metadata={"a": "b"})
    assert (other.status_code, other.json()["error_code"]) == (409, "idempotency_mismatch")
    assert server.api("DELETE", f"/sandboxes/{sandbox_id}").status_code == 204
    late = create()
    assert (late.status_code, late.json()["error_code"]) == (409, "idempotency_key_used")


@pytest.mark.only("qemu")  # a kernel of its own panics
def test_what_ended_says_why(server):
    sandbox_id = server.create("base", timeout=300)["sandboxID"]
    server.cli("exec", sandbox_id, "-u", "root", "--", "sh", "-c", "echo c > /proc/sysrq-trigger")
    answer = until(
        lambda: (a := server.api("GET", f"/sandboxes/{sandbox_id}")).status_code == 404 and a
    )
    body = answer.json()
    assert "panic" in body["message"] and body["error_code"] == "sandbox_not_found"
    assert body["details"]["cause"]["kind"] == "panic" and body["details"]["cause"]["console"]
    logs = server.api("GET", f"/sandboxes/{sandbox_id}/logs").json()["logEntries"]
    assert logs[-1]["level"] == "error" and logs[-1]["fields"]["cause"] == "panic"
    inspected = json.loads(server.cli("inspect", sandbox_id, check=True).stdout)
    assert inspected["cause"]["kind"] == "panic" and not inspected["traffic_token"]
