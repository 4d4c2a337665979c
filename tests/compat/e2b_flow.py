"""What a user of the official SDK does, run with that SDK's own interpreter.

``python e2b_flow.py`` with E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY set. Each step
prints its name when it held; the first that does not ends the script with a traceback.
"""

import datetime
import hashlib
import json
import os
import threading
import time
import urllib.error
import urllib.request

import e2b
from e2b import (
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxQuery,
    TimeoutException,
)

STEPS = []


def step(function):
    STEPS.append(function)
    return function


@step
def foreground_output_and_exit_code(sbx):
    done = sbx.commands.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 0)
    try:
        sbx.commands.run("echo partial; exit 7")
    except CommandExitException as error:
        assert error.exit_code == 7 and error.stdout == "partial\n"
    else:
        raise AssertionError("exit 7 raised nothing")


@step
def output_is_streamed(sbx):
    seen = []
    sbx.commands.run("for i in 1 2 3; do echo $i; done", on_stdout=seen.append)
    assert "".join(seen) == "1\n2\n3\n"


@step
def background_list_connect_kill(sbx):
    handle = sbx.commands.run("echo up; exec sleep 600", background=True)
    assert handle.pid in [p.pid for p in sbx.commands.list()]
    other = sbx.commands.connect(handle.pid)
    assert other.pid == handle.pid
    assert sbx.commands.kill(handle.pid) is True
    try:
        handle.wait()
    except CommandExitException as error:
        assert error.exit_code != 0
    assert handle.pid not in [p.pid for p in sbx.commands.list()]
    assert sbx.commands.kill(handle.pid) is False


@step
def stdin_is_passed_and_closed(sbx):
    handle = sbx.commands.run("cat; echo done", background=True, stdin=True)
    sbx.commands.send_stdin(handle.pid, "hällo\n")
    if hasattr(sbx.commands, "close_stdin"):
        sbx.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "hällo\ndone\n"
    else:
        seen = []
        for out, _err, _pty in handle:
            seen.append(out or "")
            if "hällo" in "".join(seen):
                break
        sbx.commands.kill(handle.pid)


@step
def environment_working_directory_and_users(sbx):
    run = sbx.commands.run
    assert (
        run("echo $GREETING $E2B_SANDBOX", envs={"GREETING": "hi there"}).stdout
        == "hi there true\n"
    )
    assert run("echo $FROM_CREATE").stdout == "yes\n"
    assert run("pwd", cwd="/usr/bin").stdout == "/usr/bin\n"
    assert run("whoami; echo $HOME", user="root").stdout == "root\n/root\n"
    run("id guest >/dev/null 2>&1 || useradd -m guest", user="root")
    assert (
        run("whoami; echo $HOME; pwd", user="guest").stdout == "guest\n/home/guest\n/home/guest\n"
    )
    for bad in ({"user": "nobody-such"}, {"cwd": "/no/such/place"}):
        try:
            run("true", **bad)
        except (e2b.SandboxException, e2b.AuthenticationException) as error:
            assert not isinstance(error, CommandExitException), error
        else:
            raise AssertionError(f"{bad} was accepted")


@step
def terminals_resize_interrupt_and_end(sbx):
    seen, ended = [], []
    handle = sbx.pty.create(size=e2b.PtySize(rows=30, cols=100))

    def follow():
        try:
            handle.wait(on_pty=lambda data: seen.append(bytes(data)))
        except CommandExitException as error:
            ended.append(error.exit_code)

    def until(needle, *, at_end=False):
        deadline = time.monotonic() + 60
        # gVisor's terminals interrupt, and pass the key on as well: bash rings the bell.
        while not (
            b"".join(seen).rstrip(b"\a").endswith(needle) if at_end else needle in b"".join(seen)
        ):
            assert time.monotonic() < deadline, (needle, b"".join(seen))
            time.sleep(0.02)

    thread = threading.Thread(target=follow)
    thread.start()
    sbx.pty.send_stdin(handle.pid, b"stty size; echo term=$TERM\n")
    until(b"30 100")
    until(b"term=xterm-256color")
    sbx.pty.resize(handle.pid, e2b.PtySize(rows=50, cols=120))
    sbx.pty.send_stdin(handle.pid, b"stty size\n")
    until(b"50 120")
    sbx.pty.send_stdin(handle.pid, b"echo sle$((1 + 1))ping; sleep 1000\n")
    until(b"sle2ping")
    # bash loses an interrupt that comes between its fork and the program's start.
    deadline = time.monotonic() + 60
    while "\nsleep 1000\n" not in sbx.commands.run("ps ax -o args").stdout:
        assert time.monotonic() < deadline
    sbx.pty.send_stdin(handle.pid, b"\x03")
    # A line over 4 KiB needs the shell's own line editing, which comes with its prompt.
    until(b"# ", at_end=True)
    sbx.pty.send_stdin(handle.pid, b"printf %s " + b"x" * 6000 + b" | wc -c\n")
    until(b"6000\r\n")
    sbx.pty.send_stdin(handle.pid, b"exit 7\n")
    thread.join(60)
    assert ended == [7], ended


@step
def files_carry_metadata(sbx):
    if not hasattr(e2b.sandbox.filesystem.filesystem.WriteInfo, "metadata") and "metadata" not in (
        sbx.files.write.__code__.co_varnames
    ):
        return  # this generation has none
    written = sbx.files.write("/tmp/noted", "x", metadata={"Author": "me", "n": "1"})
    assert written.metadata == {"author": "me", "n": "1"}, written
    assert sbx.files.get_info("/tmp/noted").metadata == {"author": "me", "n": "1"}
    sbx.files.write("/tmp/noted", "y")
    assert not sbx.files.get_info("/tmp/noted").metadata


@step
def folders_are_watched(sbx):
    files = sbx.files
    files.make_dir("/tmp/watched/inner")
    watch = files.watch_dir("/tmp/watched", recursive=True)
    files.write("/tmp/watched/new.txt", "x")
    events = [(event.name, event.type.value) for event in watch.get_new_events()]
    assert events == [("new.txt", "create"), ("new.txt", "chmod"), ("new.txt", "write")], events
    files.write("/tmp/watched/inner/deep", "x")
    files.rename("/tmp/watched/new.txt", "/tmp/watched/old.txt")
    files.remove("/tmp/watched/old.txt")
    events = [(event.name, event.type.value) for event in watch.get_new_events()]
    wanted = [("inner/deep", "create"), ("new.txt", "rename"), ("old.txt", "remove")]
    assert [event for event in events if event in wanted] == wanted, events
    watch.stop()
    for bad in ("/tmp/none", "/etc/hostname"):
        try:
            files.watch_dir(bad)
        except (e2b.SandboxException, NotFoundException):
            continue
        raise AssertionError(f"{bad} was watched")


@step
def large_and_binary_output(sbx):
    done = sbx.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
    assert done.stdout == "x" * 3_000_000
    done = sbx.commands.run(
        "head -c 100000 /dev/urandom > /tmp/blob; sha256sum < /tmp/blob; cat /tmp/blob >&2"
    )
    data = bytes(sbx.files.read("/tmp/blob", format="bytes"))
    assert len(data) == 100_000 and hashlib.sha256(data).hexdigest() == done.stdout.split()[0]


@step
def deadlines_of_commands(sbx):
    try:
        sbx.commands.run("echo early; sleep 600", timeout=2)
    except TimeoutException:
        pass
    else:
        raise AssertionError("no timeout")
    deadline = time.monotonic() + 60
    while "sleep 600" in sbx.commands.run("ps ax -o args | grep '[s]leep 600' || true").stdout:
        assert time.monotonic() < deadline, "the timed-out command still runs"


@step
def files(sbx):
    sbx.files.write("/home/user-made/deep/er/a.txt", "täxt")
    assert sbx.files.read("/home/user-made/deep/er/a.txt") == "täxt"
    blob = os.urandom(5_000_000)
    sbx.files.write("/tmp/big.bin", blob)
    assert bytes(sbx.files.read("/tmp/big.bin", format="bytes")) == blob
    assert (
        sbx.commands.run("sha256sum /tmp/big.bin").stdout.split()[0]
        == hashlib.sha256(blob).hexdigest()
    )
    written = sbx.files.write_files(
        [{"path": "/tmp/m/1", "data": "one"}, {"path": "/tmp/m/2", "data": b"two"}]
    )
    assert [w.path for w in written] == ["/tmp/m/1", "/tmp/m/2"]
    assert sorted(e.name for e in sbx.files.list("/tmp/m")) == ["1", "2"]
    info = sbx.files.get_info("/tmp/m/1")
    assert (info.name, info.size) == ("1", 3)
    assert sbx.files.rename("/tmp/m/1", "/tmp/m/x").path == "/tmp/m/x"
    assert sbx.files.exists("/tmp/m/x") and not sbx.files.exists("/tmp/m/1")
    assert sbx.files.make_dir("/tmp/n/o") is True and sbx.files.make_dir("/tmp/n/o") is False
    sbx.files.remove("/tmp/m")
    assert not sbx.files.exists("/tmp/m")
    assert len(sbx.files.read("/proc/sys/kernel/random/boot_id").strip()) == 36
    for action in (lambda: sbx.files.read("/no/such"), lambda: sbx.files.list("/no/such")):
        try:
            action()
        except NotFoundException:
            pass
        else:
            raise AssertionError("a missing file was found")


@step
def many_at_once(sbx):
    outcomes = []

    def work(number):
        outcomes.append(sbx.commands.run(f"echo {number}").stdout.strip() == str(number))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 8


@step
def list_info_and_extension(sbx):
    listed = Sandbox.list(query=SandboxQuery(metadata={"purpose": "compat test"})).next_items()
    assert [s.sandbox_id for s in listed] == [sbx.sandbox_id], listed
    assert Sandbox.list(query=SandboxQuery(metadata={"purpose": "other"})).next_items() == []
    before = sbx.get_info().end_at
    sbx.set_timeout(1200)
    assert sbx.get_info().end_at > before
    extended = sbx.get_info().end_at
    again = Sandbox.connect(sbx.sandbox_id, timeout=60)
    assert again.commands.run("echo again").stdout == "again\n"
    assert sbx.get_info().end_at == extended, "connect shortened the life"


def fetch(url, data=None, **headers):
    """As any HTTP client does: no header of E2B's."""
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@step
def signed_urls_need_nothing_else(sbx):
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nby url\r\n--b--\r\n'
    status, answer = fetch(sbx.upload_url("/tmp/signed dir/ä"), part, **form)
    assert status == 200, answer
    assert sbx.files.read("/tmp/signed dir/ä") == "by url"
    assert fetch(sbx.download_url("/tmp/signed dir/ä")) == (200, b"by url")
    fresh = sbx.download_url("/tmp/signed dir/ä", use_signature_expiration=60)
    assert fetch(fresh) == (200, b"by url")
    stale = sbx.download_url("/tmp/signed dir/ä", use_signature_expiration=-60)
    status, answer = fetch(stale)
    assert (status, json.loads(answer)) == (
        401,
        {"code": 401, "message": "signature is already expired"},
    )
    status, _ = fetch(fresh.replace("signed", "other"))
    assert status == 401


@step
def metrics_come_soon(sbx):
    deadline = time.monotonic() + 30
    while not (samples := sbx.get_metrics()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert samples[-1].mem_total > samples[-1].mem_used > 0 and samples[-1].cpu_count >= 1
    before = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    assert sbx.get_metrics(start=before, end=before + datetime.timedelta(days=1)) == []


@step
def the_network_is_replaced(sbx):
    sbx.update_network({"deny_out": ["0.0.0.0/0"], "allow_out": ["192.0.2.0/24"]})
    assert sbx.get_info().network["deny_out"] == ["0.0.0.0/0"]
    sbx.update_network({})
    assert not sbx.get_info().network.get("deny_out")


@step
def input_is_streamed(sbx):
    handle = sbx.commands.run("cat", background=True, stdin=True)
    if not hasattr(handle, "stream_input"):
        return sbx.commands.kill(handle.pid)  # this generation has none
    handle.stream_input(f"line {n}\n" for n in range(100))
    handle.close_stdin()
    assert handle.wait().stdout == "".join(f"line {n}\n" for n in range(100))
    return None


@step
def servers_answer_by_header_and_by_name(sbx):
    page = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8123, bind='0.0.0.0')"
    handle = sbx.commands.run(f'cd /tmp/signed* && python3 -c "{page}"', background=True)
    base = os.environ["E2B_SANDBOX_URL"]
    by_header = {"E2b-Sandbox-Id": sbx.sandbox_id, "E2b-Sandbox-Port": "8123"}
    deadline = time.monotonic() + 60
    while fetch(base, **by_header)[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert fetch(base, Host=sbx.get_host(8123))[0] == 200
    status, answer = fetch(base, **{**by_header, "E2b-Sandbox-Port": "8124"})
    assert status == 502 and "port is not open" in json.loads(answer)["message"]
    sbx.commands.kill(handle.pid)


@step
def killing_cuts_what_is_open(sbx):
    other = Sandbox.create(
        os.environ.get("COMPAT_TEMPLATE", "base"), timeout=300, request_timeout=300
    )
    handle = other.commands.run("echo up; sleep 600", background=True)
    assert next(iter(handle))[0] == "up\n"
    assert other.kill() is True
    try:
        handle.wait()
    except e2b.SandboxException as error:
        assert not isinstance(error, CommandExitException), error
        assert "killed or reached its end of life" in str(error), error
    else:
        raise AssertionError("the stream of a killed sandbox ended well")


@step
def kill(sbx):
    assert sbx.is_running() is True
    assert sbx.kill() is True
    assert sbx.kill() is False
    assert sbx.is_running() is False
    try:
        sbx.commands.run("true")
    except e2b.SandboxException as error:
        assert not isinstance(error, CommandExitException)
    else:
        raise AssertionError("a killed sandbox ran a command")


def main():
    template = os.environ.get("COMPAT_TEMPLATE", "base")
    sbx = Sandbox.create(
        template,
        timeout=600,
        metadata={"purpose": "compat test"},
        envs={"FROM_CREATE": "yes"},
        request_timeout=300,
    )
    try:
        for function in STEPS:
            begun = time.monotonic()
            function(sbx)
            print(f"held {function.__name__} {time.monotonic() - begun:.2f}s", flush=True)
    finally:
        Sandbox.kill(sbx.sandbox_id) if hasattr(Sandbox, "kill") else None


if __name__ == "__main__":
    main()
