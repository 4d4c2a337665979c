"""Both engines on one node: who asks for one gets it, and what is saved stays with its own."""

import pytest

pytestmark = pytest.mark.only("gvisor")  # it is there wherever these tests run


@pytest.fixture
def made(server):
    """A sandbox of the engine that is not the server's own."""
    found = server.create("base", timeout=600, engine="qemu")["sandboxID"]
    yield found
    server.api("DELETE", f"/sandboxes/{found}")


def engine_of(server, sandbox_id):
    return server.api("GET", f"/sandboxes/{sandbox_id}").json()["engine"]


def test_a_sandbox_runs_in_the_engine_that_was_asked_for(server, made):
    assert engine_of(server, made) == "qemu"
    kernel = server.cli("exec", made, "--", "cat", "/proc/version", check=True).stdout
    other = server.cli("run", "base", "--", "cat", "/proc/version", check=True).stdout
    assert b"Debian" in kernel and b"Debian" not in other
    server.kill()
    server.start()
    assert server.cli("exec", made, "--", "echo", "on", check=True).stdout == b"on\n"


def test_what_is_saved_stays_with_its_engine(server, made):
    saved = server.api("POST", f"/sandboxes/{made}/snapshots", json={}).json()["snapshotID"]
    copy = server.create(saved, timeout=600)["sandboxID"]
    try:
        assert engine_of(server, copy) == "qemu"
        body = {"templateID": saved, "engine": "gvisor"}
        refused = server.api("POST", "/v2/sandboxes", json=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error_code"] == "fixed_by_template"
    finally:
        server.api("DELETE", f"/sandboxes/{copy}")


def test_an_engine_that_is_none_is_refused(server):
    answer = server.api("POST", "/v2/sandboxes", json={"templateID": "base", "engine": "xen"})
    assert answer.status_code == 400 and "xen" in answer.json()["message"]


def test_a_node_tells_what_each_can_do_and_which_it_takes(server):
    (node,) = server.api("GET", "/nodes").json()
    found = node["capabilities"]
    assert found["engine"] == "gvisor" and found["reason"] == "the configuration names it"
    assert found["engines"].keys() == {"qemu", "gvisor"} and not found["missing"]
    assert found["engines"]["qemu"]["notes"][0].startswith("KVM: ")
