"""Sandboxes through the whole product: API, CLI, proxy, networks, limits."""

import concurrent.futures
import json
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.both


@pytest.fixture(scope="module")
def sandbox(server):
    made = server.create("base", timeout=900, metadata={"suite": "node"})
    yield made["sandboxID"]
    server.api("DELETE", f"/sandboxes/{made['sandboxID']}")


def sh(server, sandbox_id, script, **more):
    return server.cli("exec", sandbox_id, "--", "/bin/sh", "-c", script, **more)


def test_exec_passes_output_input_and_exit_code(server, sandbox):
    done = sh(server, sandbox, "cat; echo err >&2; exit 3", stdin=b"in\0\xff\n")
    assert (done.stdout, done.stderr, done.returncode) == (b"in\0\xff\n", b"err\n", 3)


def test_run_makes_and_ends_a_sandbox_of_its_own(server):
    before = {s["sandboxID"] for s in server.api("GET", "/v2/sandboxes").json()}
    done = server.cli("run", "base", "-e", "A=b", "--", "sh", "-c", "echo $A; exit 9")
    assert (done.returncode, done.stdout) == (9, b"b\n")
    assert {s["sandboxID"] for s in server.api("GET", "/v2/sandboxes").json()} == before


def test_sizes_are_what_was_asked_for(server):
    script = "nproc; grep MemTotal /proc/meminfo; df -m / | tail -1"
    options = ("--memory", "384", "--disk", "2048", "--cpus", "1")
    words = server.cli("run", "base", *options, "--", "sh", "-c", script, check=True).stdout.split()
    assert 300 * 1024 < int(words[2]) <= 384 * 1024
    if server.engine == "qemu":  # gVisor has two CPUs at least, and tells of no disk's size
        assert int(words[0]) == 1 and 1800 < int(words[5]) <= 2048


def test_inspect_names_every_host_object(server, sandbox):
    found = server.inspect(sandbox)
    objects = found["objects"]
    assert {"pid", "netns", "tap", "uid", "files", "run_dir"} <= objects.keys()
    assert json.loads(json.dumps(found["phases"])).keys() >= {"slot", "open", "boot", "init"}
    assert found["access_token"] is None
    with Path(f"/proc/{objects['pid']}/status").open() as status:
        uid = next(line for line in status if line.startswith("Uid:")).split()[1]
    if server.engine == "qemu":
        assert int(uid) == objects["uid"] != 0


def test_logs_are_the_console(server, sandbox):
    assert len(server.cli("logs", sandbox, "-n", "5", check=True).stdout.splitlines()) <= 5


def test_each_sandbox_is_its_own(server, sandbox):
    other = server.create("base", timeout=300)["sandboxID"]
    try:
        identity = "cat /etc/machine-id /proc/sys/kernel/random/boot_id /etc/hostname"
        assert sh(server, sandbox, identity).stdout != sh(server, other, identity).stdout
        sh(server, sandbox, "echo mine > /marker", check=True)
        assert sh(server, other, "test -e /marker").returncode == 1
        draw = "head -c 32 /dev/urandom | od -An -tx1"
        assert sh(server, sandbox, draw).stdout != sh(server, other, draw).stdout
    finally:
        server.cli("kill", other, check=True)


def test_the_guests_clock_is_the_hosts(server, sandbox):
    before = time.time()
    guest = float(sh(server, sandbox, "date +%s.%N", check=True).stdout)
    assert before - 0.5 <= guest <= time.time() + 0.5


def test_a_web_server_is_reached_by_host_name_and_by_headers(server, sandbox):
    script = (
        "import http.server as h; s = h.ThreadingHTTPServer(('0.0.0.0', 8000), "
        "h.SimpleHTTPRequestHandler); print('up', flush=True); s.serve_forever()"
    )
    server.api(
        "POST",
        "/files?path=/srv/hello.txt",
        headers={**envd(server, sandbox), "Content-Type": "application/octet-stream"},
        content=b"hello" * 1000,
    ).raise_for_status()
    sh(server, sandbox, f"cd /srv; nohup python3 -c \"{script}\" >/tmp/log 2>&1 &"
                        " until grep -q up /tmp/log; do sleep 0.05; done", check=True)  # fmt: skip
    by_host = httpx.get(
        f"{server.url}/hello.txt", headers={"Host": f"8000-{sandbox}.localhost"}, trust_env=False
    )
    by_header = httpx.get(
        f"{server.url}/hello.txt",
        headers={"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": "8000"},
        trust_env=False,
    )
    assert by_host.text == by_header.text == "hello" * 1000


def envd(server, sandbox_id):
    token = server.api("GET", f"/sandboxes/{sandbox_id}").json()["envdAccessToken"]
    return {"E2b-Sandbox-Id": sandbox_id, "X-Access-Token": token}


def test_closed_ports_and_unknown_sandboxes_have_their_502(server, sandbox):
    def get(sandbox_id, port):
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}
        return httpx.get(server.url, headers=headers, trust_env=False, timeout=60)

    closed = get(sandbox, 4)
    assert closed.status_code == 502 and "port is not open" in closed.json()["message"]
    unknown = get("a" * 20, 80)
    assert unknown.status_code == 502 and "was not found" in unknown.json()["message"]


def test_the_in_guest_api_wants_the_token(server, sandbox):
    for token in ({}, {"X-Access-Token": "wrong"}):
        answer = httpx.get(
            f"{server.url}/files?path=/etc/passwd",
            headers={"E2b-Sandbox-Id": sandbox, **token},
            trust_env=False,
        )
        assert answer.status_code == 401


@pytest.mark.parametrize("target", ["gateway", "host", "metadata", "other"])
def test_a_guest_reaches_neither_host_nor_neighbours(server, sandbox, target):
    """The host's own API listens on every address named here or is dropped on the way."""
    addresses = {
        "gateway": ("10.233.0.1", server.port),
        "host": (host_address(), server.port),
        "metadata": ("169.254.169.254", 80),
        "other": ("10.234.0.1", 22),
    }
    host, port = addresses[target]
    script = f"import socket; s = socket.socket(); s.settimeout(3); s.connect(('{host}', {port}))"
    assert sh(server, sandbox, f'python3 -c "{script}"').returncode != 0


def host_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]


def test_a_timeout_ends_it_and_says_so(server):
    made = server.create("base", timeout=600)["sandboxID"]
    assert server.api("POST", f"/sandboxes/{made}/timeout", json={"timeout": 0}).status_code == 204
    deadline = time.monotonic() + 60
    while server.api("GET", f"/sandboxes/{made}").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while server.inspect(made)["state"] != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "lifetime" in server.inspect(made)["cause"]["reason"]


def test_an_acknowledged_extension_is_never_followed_by_the_old_expiry(server):
    made = server.create("base", timeout=600)["sandboxID"]
    for _ in range(20):
        for seconds in (1, 600):
            path = f"/sandboxes/{made}/timeout"
            assert server.api("POST", path, json={"timeout": seconds}).status_code == 204
    time.sleep(1.2)  # the old deadlines have passed: the thing waited for is that nothing happens
    assert server.api("GET", f"/sandboxes/{made}").json()["state"] == "running"
    server.cli("kill", made, check=True)


def test_many_creates_and_kills_at_once(server):
    def life(_):
        made = server.create("base", timeout=600)["sandboxID"]
        return sh(server, made, "echo ok").stdout, server.cli("kill", made).returncode

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        assert list(pool.map(life, range(5))) == [(b"ok\n", 0)] * 5


@pytest.mark.parametrize(
    ("words", "status", "needle"),
    [
        (("run", "no-such-template", "--", "true"), 64, "no-such-template"),
        (("exec", "a" * 20, "--", "true"), 64, "not found"),
        (("kill",), 64, "nothing to kill"),
        (("run", "base", "-e", "novalue", "--", "true"), 64, "NAME=value"),
        (("run", "base", "--memory", "99999999", "--", "true"), 64, "memory"),
    ],
)
def test_cli_errors_tell_what_and_leave_with_their_code(server, words, status, needle):
    done = server.cli(*words)
    text = done.stderr.decode()
    assert done.returncode == status, text
    assert needle in text and "Traceback" not in text


def test_a_command_that_does_not_exist_is_the_users_fault(server, sandbox):
    done = server.cli("exec", sandbox, "--", "/no/such/program")
    assert done.returncode == 64 and b"/no/such/program" in done.stderr


def test_a_refused_removal_changes_nothing(server, sandbox):
    done = server.cli("image", "rm", "base")
    assert done.returncode == 64 and b"in use by sandbox" in done.stderr
    [listed] = [i for i in json.loads(server.cli("image", "ls", check=True).stdout)
                if "base" in i["names"]]  # fmt: skip
    assert server.inspect(sandbox)["image_id"] == listed["id"]


def test_an_ended_sandbox_keeps_its_post_mortem_but_no_token(server):
    made = server.create("base", timeout=86_400)["sandboxID"]
    server.cli("kill", made, check=True)
    shown = server.inspect(made)
    assert shown["state"] == "ended" and shown["cause"]["reason"]
    # Kept an hour from its end, not from the day-long life it was given.
    assert datetime.fromisoformat(shown["end_at"]) <= datetime.now(UTC)
    assert shown["access_token"] is None
