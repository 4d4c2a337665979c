"""Sandboxes in gVisor, made and driven as any others."""

import subprocess
from pathlib import Path

import pytest

from agentenv.host.mount import device_of
from tests.integration.suspend.conftest import Guest
from tests.waiting import until

MIB = 1 << 20
pytestmark = pytest.mark.only("gvisor")


def made(server, guest_of, **fields):
    return guest_of(server.create("base", timeout=600, **fields)["sandboxID"])


def test_a_guest_finds_what_it_expects(server, guest_of):
    guest = made(server, guest_of)
    assert guest.sh("hostname") == guest.id
    assert guest.sh("dmesg | head -1 || true; uname -s").endswith("Linux")
    assert guest.sh("stat -fc %T /tmp") == guest.sh("stat -fc %T /srv")  # no memory of its own
    assert ".agentenv" not in guest.sh("ls -A /")
    assert guest.sh("test -c /dev/null && test -u /bin/su && id -u") == "0"
    assert guest.sh("python3 -c 'import pty; pty.spawn([\"tty\"])'").startswith("/dev/pts/")


def test_its_limits_hold_and_are_told(server, guest_of):
    guest = made(server, guest_of, memoryMB=256, diskSizeMB=64)
    said = guest.sh("dd if=/dev/zero of=/srv/big bs=1M count=200 2>&1 || true")
    assert "No space left on device" in said
    guest.sh("rm /srv/big; dd if=/dev/zero of=/srv/less bs=1M count=30 2>&1")
    (now,) = until(lambda: server.api("GET", f"/sandboxes/{guest.id}/metrics").json()[-1:])
    assert now["memTotal"] == 256 * MIB and now["diskTotal"] == 64 * MIB
    server.cli("exec", guest.id, "--", "python3", "-c", "bytearray(b'x') * (2 << 30)")
    cause = until(lambda: guest.inspect()["cause"])
    assert cause["kind"] == "out_of_memory"


def test_processes_outlive_a_pause_and_the_server(server, guest):
    guest.pause()
    verdict = guest.resume()["restore"]
    assert verdict["frozen"] and verdict["entropy_reseeded"]
    guest.counts_on()
    assert guest.clock_is_right()
    server.kill()
    server.start()
    guest.counts_on()


def test_copies_of_a_running_one_are_others(server, guest, guest_of):
    entries = guest.post("fork", 201, count=2)
    assert all("sandbox" in each for each in entries), entries
    copies = [guest_of(each["sandbox"]["sandboxID"]) for each in entries]
    machine_ids = {each.identity()[0] for each in (guest, *copies)}
    drawn = {each.sh("od -An -N8 -tx8 /dev/urandom") for each in (guest, *copies)}
    assert len(machine_ids) == len(drawn) == 3
    for each in (guest, *copies):
        each.counts_on()


def test_one_that_was_stored_comes_back_from_the_store(server, guest):
    guest.sh("head -c 4M /dev/urandom > /srv/data; sha256sum /srv/data > /srv/sum")
    guest.pause()
    folder = server.home / "snapshots"
    until(lambda: not any(folder.glob("*.memory")))  # it became a layer
    guest.resume()
    guest.sh("sha256sum -c /srv/sum")
    guest.counts_on()


def test_of_what_was_in_memory_nothing_is_left_when_the_disk_alone_comes_back(server, guest):
    guest.sh("echo kept > /srv/kept; echo gone | tee /dev/shm/gone > /run/gone")
    answer = server.api("POST", f"/sandboxes/{guest.id}/pause", json={"memory": False})
    assert answer.status_code == 204
    guest.resume()
    assert guest.sh("cat /srv/kept; ls -A /dev/shm /run; ls /proc | grep -c '^[0-9]'").split() == [
        "kept", "/dev/shm:", "/run:", guest.sh("ls /proc | grep -c '^[0-9]'"),
    ]  # fmt: skip


def test_sandboxes_of_an_image_share_a_mount_which_goes_with_the_last(server, guest_of):
    def mounted():
        found = subprocess.run(["findmnt", "-rno", "TARGET"], capture_output=True, text=True)
        return [line for line in found.stdout.splitlines() if str(roots) in line]

    first = made(server, guest_of)
    roots = Path(first.inspect()["objects"]["run_dir"]).parents[1] / "roots"
    before = mounted()
    second = made(server, guest_of)
    assert mounted() == before and len(before) == 2  # the image, and the agent below it
    [image] = roots.glob("*.image")
    direct = Path("/sys/block") / device_of(image).name / "loop/dio"
    assert direct.read_text() == "1\n"  # its pages are cached once
    for each in (first, second):
        server.api("DELETE", f"/sandboxes/{each.id}")
    until(lambda: not mounted())


def test_nobody_without_the_key_controls_a_guest(server, guest):
    assert Guest(server, guest.id).sh("cat /proc/1/environ | wc -c")
    asked = "import socket; s=socket.create_connection(('127.0.0.1',49982)); s.sendall(b'x\\n'); "
    assert guest.sh(f'python3 -c "{asked}print(s.recv(9))"') == "b''"


def test_who_needs_no_password_may_be_root_and_nobody_else(server, guest_of):
    """Its kernel ignores set-user-id bits: the agent starts the image's own sudo."""
    guest = made(server, guest_of)
    rule = "echo '{0} ALL=(ALL:ALL) {1} ALL' > /etc/sudoers.d/{0}"
    guest.sh("; ".join(f"useradd -m {name}" for name in ("alice", "bob", "carol")))
    guest.sh(f"{rule.format('alice', 'NOPASSWD:')}; {rule.format('bob', '')}")

    def run(script, user="alice"):
        done = server.cli("exec", guest.id, "-u", user, "--", "/bin/bash", "-c", script)
        return done.returncode, done.stdout.decode().strip(), done.stderr.decode().strip()

    assert run("id -u; sudo -n id -u; sudo -u bob id -un") == (0, "1000\n0\nbob", "")
    assert run("echo one | sudo cat; sudo sh -c 'exit 7'") == (7, "one", "")
    assert run("cd /tmp; umask 27; sudo touch new; stat -c %a new; sudo pwd") == (
        0,
        "640\n/tmp",
        "",
    )
    assert run("echo one > ~/log; sudo echo two >> ~/log; cat ~/log; sudo -x")[:2] == (
        1,
        "one\ntwo",
    )
    assert run("timeout 1 sudo sleep 99; echo $?; pgrep sleep; sudo kill -9 $$")[:2] == (137, "124")
    for user in ("bob", "carol"):
        code, said, error = run("sudo -n id -u", user)
        assert code == 1 and not said and "password is required" in error
    assert guest.sh("sudo id -u; ls -A /") and ".agentenv" not in guest.sh("ls -A /")
