"""Processes: their streams, their input, their end and everybody they started."""

import base64
import json
import os
from pathlib import Path

import pytest
from tests.integration.agent.conftest import ended, output, start
from tests.waiting import until

from agentenv.sdk import envelope


def gone(pid: int) -> bool:
    """Ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


def pid_of(messages) -> int:
    return next(m["event"]["start"]["pid"] for m in messages if "start" in m.get("event", {}))


def test_output_arrives_whole_and_apart(agent):
    messages = agent.run("printf out; printf err >&2; exit 3")
    assert (output(messages), output(messages, "stderr")) == (b"out", b"err")
    assert ended(messages) == {
        "exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3",
    }  # fmt: skip
    assert messages[-1] == {"end": {}}


def test_every_byte_passes(agent):
    octal = "".join(f"\\{value:03o}" for value in range(256))
    assert output(agent.run(f"printf '{octal}'")) == bytes(range(256))


def test_output_before_the_deadline_is_delivered_and_descendants_die(agent, tmp_path):
    pids = tmp_path / "pids"
    script = f"echo early; (sleep 60 & echo $! > {pids}; wait) & setsid sleep 61 & echo $! >> {pids}.own; wait"
    messages = agent.run(script, **{"Connect-Timeout-Ms": "700"})
    assert output(messages) == b"early\n"
    assert messages[-1]["end"]["error"]["code"] == "deadline_exceeded"
    left = [int(pids.read_text()), int(Path(f"{pids}.own").read_text())]
    until(lambda: all(gone(pid) for pid in left))


def test_the_deadline_holds_though_the_starter_has_left(agent, tmp_path):
    follow = agent.follow(
        "process.Process/Start", start("sleep 60"), **{"Connect-Timeout-Ms": "600"}
    )
    pid = next(follow)["event"]["start"]["pid"]
    follow.close()
    assert not gone(pid)
    until(lambda: gone(pid))


def test_killing_takes_descendants(agent, tmp_path):
    pids = tmp_path / "pids"
    follow = agent.follow(
        "process.Process/Start", start(f"setsid sleep 60 & echo $! > {pids}; echo up; wait")
    )
    pid = next(follow)["event"]["start"]["pid"]
    next(follow)
    answer = agent.call(
        "process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}
    )
    assert answer.status_code == 200
    rest = list(follow)
    assert ended(rest)["status"] == "signal: killed"
    until(lambda: gone(int(pids.read_text())))


def test_the_end_does_not_wait_for_who_holds_the_pipe(agent, tmp_path):
    pids = tmp_path / "pids"
    messages = agent.run(f"sleep 60 & echo $! > {pids}; echo done")
    assert output(messages) == b"done\n" and ended(messages)["exitCode"] == 0
    child = int(pids.read_text())
    assert not gone(child)
    os.kill(child, 9)


def test_a_client_that_leaves_does_not_end_the_process(agent):
    follow = agent.follow("process.Process/Start", start("sleep 60", tag="stays"))
    pid = next(follow)["event"]["start"]["pid"]
    follow.close()
    listed = agent.call("process.Process/List").json()["processes"]
    assert {"pid": pid, "tag": "stays"}.items() <= next(
        p for p in listed if p["pid"] == pid
    ).items()
    again = agent.follow("process.Process/Connect", {"process": {"tag": "stays"}})
    assert next(again)["event"]["start"]["pid"] == pid
    agent.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9})
    assert ended(list(again))["exited"] is False


def test_keepalives_fill_silence(agent):
    messages = agent.run("sleep 2.5", **{"Keepalive-Ping-Interval": "1"})
    assert [m for m in messages if "keepalive" in m.get("event", {})]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"process": {"cmd": ""}}, "invalid_argument"),
        ({"process": {"cmd": "/nonexistent"}}, "invalid_argument"),
        ({"process": {"cmd": "a\0b"}}, "invalid_argument"),
        ({"process": {"cmd": "/bin/true", "cwd": "/nonexistent"}}, "invalid_argument"),
        ({"process": {"cmd": "/bin/true", "args": "x"}}, "invalid_argument"),
    ],
)
def test_what_cannot_start_says_why(agent, message, code):
    (only,) = agent.stream("process.Process/Start", message)
    assert only["end"]["error"]["code"] == code


def test_one_that_could_not_start_is_waited_for(agent):
    agent.stream("process.Process/Start", {"process": {"cmd": "/nonexistent"}})
    states = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        for task in Path(f"/proc/{agent.process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    assert "Z" not in states


def test_nothing_is_ignored_or_blocked_in_it(agent):
    messages = agent.run("exec cat /proc/self/status")
    status = dict(line.split(":\t", 1) for line in output(messages).decode().splitlines())
    glibcs = 0b11 << 31  # 32 and 33, which it lets no program set; our parents may ignore them
    assert int(status["SigBlk"], 16) == int(status["SigIgn"], 16) & ~glibcs == 0


def test_it_is_found_by_the_path_of_the_request(agent, tmp_path):
    (tmp_path / "refused").mkdir()
    for folder, mode in (("refused", 0o644), (".", 0o755)):
        tool = tmp_path / folder / "tool"
        tool.write_text('echo "$0" "$@"')  # a script by its rights alone
        tool.chmod(mode)
    path = f"/nonexistent:{tmp_path}/refused:{tmp_path}"

    def use(path):
        process = {"cmd": "tool", "args": ["a b", "c"], "envs": {"PATH": path}}
        return agent.stream("process.Process/Start", {"process": process})

    assert output(use(path)).decode() == f"{tmp_path}/tool a b c\n"
    (only,) = use(f"{tmp_path}/refused:/nonexistent")
    assert "Permission denied" in only["end"]["error"]["message"]


def test_an_unknown_user_is_named(agent):
    basic = "Basic " + base64.b64encode(b"nobody-here:").decode()
    (only,) = agent.stream("process.Process/Start", start("true"), Authorization=basic)
    assert only["end"]["error"] == {
        "code": "unauthenticated", "message": "invalid username: 'nobody-here'",
    }  # fmt: skip


def test_a_user_may_come_with_a_group(agent):
    basic = "Basic " + base64.b64encode(b"root:daemon:").decode()
    messages = agent.run("id -un; id -gn", Authorization=basic)
    assert output(messages, "stdout").split() == [b"root", b"daemon"]


def until_seen(follow, needle: bytes) -> None:
    seen = b""
    while needle not in seen:
        seen += output([next(follow)], "pty")


def in_terminal(agent, shell: str, script: str, pty: dict):
    """A script that has said `ready` in a terminal: its messages from there on, and its pid."""
    message = {"process": {"cmd": shell, "args": ["-c", script]}, "pty": pty}
    follow = agent.follow("process.Process/Start", message)
    pid = pid_of([next(follow)])
    until_seen(follow, b"ready")
    return follow, pid


def typed(agent, pid, data: bytes):
    message = {"process": {"pid": pid}, "input": {"pty": base64.b64encode(data).decode()}}
    answer = agent.call("process.Process/SendInput", message)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("length", [100, 4000, 4001, 4095, 4096, 4097, 20_000])
def test_a_terminal_takes_lines_of_any_length(agent, length):
    """The kernel keeps 4095 bytes of a line and drops the rest; nothing may be cut here."""
    script = "stty -echo; echo ready; read -r line; printf %s ${#line}"
    follow, pid = in_terminal(agent, "/bin/bash", script, {"size": {"cols": 80, "rows": 24}})
    typed(agent, pid, b"x" * length + b"\n")
    rest = list(follow)
    assert output(rest, "pty").strip() == str(length).encode()


def test_a_raw_terminal_gets_every_byte(agent):
    script = "stty raw -echo; echo ready; head -c 9000 | sha256sum"
    follow, pid = in_terminal(agent, "/bin/sh", script, {})
    data = bytes(range(256)) * 36
    typed(agent, pid, data[:9000])
    import hashlib

    assert hashlib.sha256(data[:9000]).hexdigest().encode() in output(list(follow), "pty")


def test_a_terminal_is_resized_and_interrupted(agent):
    script = "trap 'stty size' WINCH; trap 'echo INT; exit 7' INT; echo ready; while :; do sleep 0.05; done"
    follow, pid = in_terminal(agent, "/bin/bash", script, {"size": {"cols": 80, "rows": 24}})
    size = {"process": {"pid": pid}, "pty": {"size": {"cols": 132, "rows": 50}}}
    assert agent.call("process.Process/Update", size).status_code == 200
    until_seen(follow, b"50 132")
    typed(agent, pid, b"\x03")
    rest = list(follow)
    assert b"INT" in output(rest, "pty") and ended(rest)["exitCode"] == 7


def test_streamed_input_reaches_the_process_in_order(agent):
    follow = agent.follow("process.Process/Start", start("cat; echo end", stdin=True))
    pid = next(follow)["event"]["start"]["pid"]
    pieces = [envelope.encode({"start": {"process": {"pid": pid}}})]
    for number in range(200):
        text = base64.b64encode(f"{number}\n".encode()).decode()
        pieces.append(envelope.encode({"data": {"input": {"stdin": text}}}))
        pieces.append(envelope.encode({"keepalive": {}}))
    answer = agent.http.post(
        "/process.Process/StreamInput",
        content=iter(pieces),
        headers={"Content-Type": "application/connect+json"},
    )
    assert b"error" not in answer.content
    agent.call("process.Process/CloseStdin", {"process": {"pid": pid}})
    wanted = "".join(f"{number}\n" for number in range(200)) + "end\n"
    assert output(list(follow)).decode() == wanted


def test_compressed_messages_are_refused_not_misread(agent):
    flagged = bytes([1]) + envelope.encode(start("true"))[1:]
    answer = agent.http.post(
        "/process.Process/Start",
        content=flagged,
        headers={"Content-Type": "application/connect+json"},
    )
    assert b'"unimplemented"' in answer.content


def test_much_output_in_small_writes_does_not_grow_the_agent(agent):
    """200 MB in writes of 1 KiB, taken as fast as they come."""
    script = "dd if=/dev/zero bs=1k count=204800 2>/dev/null"
    size = 0
    for message in agent.follow("process.Process/Start", start(script)):
        size += len(output([message]))
    assert size == 204800 * 1024
    assert agent.rss() < 32 << 20


def test_the_deadline_of_any_call_is_kept(agent):
    """Input for a process that reads none, in one piece and streamed."""
    follow = agent.follow("process.Process/Start", start("sleep 60", stdin=True))
    pid = next(follow)["event"]["start"]["pid"]
    data = base64.b64encode(bytes(1 << 20)).decode()
    late = {"Connect-Timeout-Ms": "300"}
    message = {"process": {"pid": pid}, "input": {"stdin": data}}
    answer = agent.call("process.Process/SendInput", message, **late)
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    pieces = envelope.encode({"start": {"process": {"pid": pid}}})
    pieces += envelope.encode({"data": {"input": {"stdin": data}}})
    headers = {"Content-Type": "application/connect+json", **late}
    answer = agent.http.post("/process.Process/StreamInput", content=pieces, headers=headers)
    assert b'"deadline_exceeded"' in answer.content
    agent.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9})
    assert ended(list(follow))["exited"] is False


def test_keys_for_a_program_that_reads_none_stop_nobody(agent):
    """Typed, given up, and its terminal closed meanwhile: the agent still answers."""
    message = {"process": {"cmd": "/bin/sleep", "args": ["60"]}, "pty": {}}
    follow = agent.follow("process.Process/Start", message)
    pid = next(follow)["event"]["start"]["pid"]
    keys = base64.b64encode(b"y" * 20_000).decode()
    typing = {"process": {"pid": pid}, "input": {"pty": keys}}
    with agent.connect() as waiting:  # stays, and waits for room
        body = json.dumps(typing).encode()
        head = f"POST /process.Process/SendInput HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        waiting.sendall(head.encode() + body)
        late = agent.call("process.Process/SendInput", typing, **{"Connect-Timeout-Ms": "500"})
        assert late.status_code == 504
        agent.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9})
        assert ended(list(follow))["exited"] is False
        assert agent.http.get("/health").status_code == 204
        assert waiting.recv(100).startswith(b"HTTP/1.1 ")
