"""Auto-pause at the deadline, auto-resume by traffic."""

import concurrent.futures
import time

import httpx
from tests.waiting import until


def make(server, guest_of, counting, **fields):
    return guest_of(server.create(counting, **fields)["sandboxID"])


def test_at_its_deadline_it_is_paused_and_traffic_brings_it_back(server, counting, guest_of):
    fields = {"timeout": 600, "autoPause": True, "autoResume": {"enabled": True}}
    guest = make(server, guest_of, counting, **fields)
    shown = server.api("GET", f"/sandboxes/{guest.id}").json()
    assert shown["lifecycle"] == {"autoResume": True, "onTimeout": "pause"}
    guest.sh("nohup python3 -m http.server 8080 -d /work > /dev/null 2>&1 & sleep 1")
    guest.post("timeout", 204, timeout=0)
    until(lambda: guest.state == "paused")
    headers = {"E2b-Sandbox-Id": guest.id, "E2b-Sandbox-Port": "8080"}

    def ask(_):
        return httpx.get(f"{server.url}/file", headers=headers, timeout=120, trust_env=False)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    assert [answer.text for answer in answers] == ["original\n"] * 6
    assert guest.state == "running" and guest.inspect()["generation"] == 2
    ends = server.api("GET", f"/sandboxes/{guest.id}").json()["endAt"]
    assert time.time() + 500 < _seconds(ends) < time.time() + 601
    guest.post("timeout", 204, timeout=0)  # what was chosen at its creation holds
    until(lambda: guest.state == "paused")
    guest.counts_on()  # by the CLI, which is traffic as well


def test_without_auto_resume_traffic_finds_nobody(server, counting, guest_of):
    guest = make(server, guest_of, counting, timeout=600, autoPause=True)
    guest.post("timeout", 204, timeout=0)
    until(lambda: guest.state == "paused")
    headers = {"E2b-Sandbox-Id": guest.id, "E2b-Sandbox-Port": "8080"}
    answer = httpx.get(f"{server.url}/file", headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 502 and "was not found" in answer.json()["message"]
    assert guest.state == "paused"


def test_choices_that_contradict_each_other(server, counting):
    for fields in (
        {"autoPauseMemory": False},
        {"autoPause": True, "autoPauseMemory": False, "autoResume": {"enabled": True}},
    ):
        body = {"templateID": counting, **fields}
        assert server.api("POST", "/v2/sandboxes", json=body).status_code == 400


def _seconds(text):
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()
