"""Images that are not Debian: busybox with musl, a single static program and nothing else."""

import json
import shutil
import subprocess

import pytest
from tests.integration.node.test_sandboxes import sh

PROGRAM = r"""
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char host[100];
    gethostname(host, sizeof host);
    printf("hello from %s, uid %d, %d words\n", argv[0], getuid(), argc);
    return argc > 1 ? 0 : 7;
}
"""


def compiled(folder, *compiler):
    source, target = folder / "program.c", folder / "program"
    source.write_text(PROGRAM)
    subprocess.run([*compiler, "-o", target, source], check=True)
    return target


def pull(server, root, name):
    server.cli("image", "pull", f"dir:{root}", "--name", name, check=True)


@pytest.fixture(scope="module")
def alpine(server, tmp_path_factory):
    """Busybox as every tool, musl as the only libc, no bash, a user of its own."""
    assert shutil.which("musl-gcc"), "run: make setup"
    folder = tmp_path_factory.mktemp("alpine")
    root = folder / "root"
    for name in ("bin", "etc", "lib", "root", "home/user"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for tool in ("sh", "cat", "echo", "id", "ls", "mount", "sleep", "ps", "stat", "env", "wget"):
        (root / "bin" / tool).symlink_to("busybox")
    shutil.copy(compiled(folder, "musl-gcc"), root / "bin/musl-program")
    shutil.copy("/lib/ld-musl-x86_64.so.1", root / "lib/ld-musl-x86_64.so.1")
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    )
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    (root / "etc/hosts").symlink_to("/nowhere/hosts")
    pull(server, root, "alpine")
    made = server.create("alpine", timeout=900)["sandboxID"]
    yield made
    server.cli("kill", made, check=True)


def test_a_musl_program_runs(server, alpine):
    done = server.cli("exec", alpine, "--", "musl-program", "word", check=True)
    assert done.stdout == b"hello from musl-program, uid 1000, 2 words\n"


def test_the_images_own_user_is_the_default(server, alpine):
    assert sh(server, alpine, "id -u; echo $HOME; pwd").stdout == b"1000\n/home/user\n/home/user\n"


def test_the_sdks_shell_is_what_there_is(server, alpine):
    done = server.cli("exec", alpine, "--", "/bin/bash", "-l", "-c", "echo $0; exit 3")
    assert done.returncode == 3 and b"sh" in done.stdout


def test_the_usual_places_are_mounted_and_names_written(server, alpine):
    mounts = sh(server, alpine, "cat /proc/mounts").stdout.decode()
    cgroups = ("/sys/fs/cgroup",) if server.engine == "qemu" else ()
    for place in ("/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", *cgroups):
        assert f" {place} " in mounts, place
    assert sh(server, alpine, "cat /etc/hostname").stdout.decode().strip() == alpine
    assert b"nameserver 10.233.0.1" in sh(server, alpine, "cat /etc/resolv.conf").stdout
    assert sh(server, alpine, "stat -c %a /tmp").stdout == b"1777\n"


def test_orphans_are_reaped(server, alpine):
    sh(server, alpine, "for i in 1 2 3 4 5; do (sleep 0.1 &) ; done; sleep 0.5", check=True)
    assert b" Z " not in sh(server, alpine, "ps -o stat,comm").stdout


@pytest.fixture(scope="module")
def scratch_image(server, tmp_path_factory):
    """One static program; no shell, no passwd, no /etc, no /tmp."""
    folder = tmp_path_factory.mktemp("scratch")
    root = folder / "root"
    root.mkdir()
    shutil.copy(compiled(folder, "gcc", "-static"), root / "only")
    pull(server, root, "scratch")


@pytest.mark.parametrize(("words", "status"), [((), 7), (("more",), 0)])
def test_a_lone_program_runs_with_its_exit_code(server, scratch_image, words, status):
    done = server.cli("run", "scratch", "--", "/only", *words)
    assert done.returncode == status
    assert done.stdout.startswith(b"hello from /only, uid 0")


def test_files_go_in_and_out_without_a_shell(server, scratch_image):
    made = server.create("scratch", timeout=300)
    headers = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
    raw = {**headers, "Content-Type": "application/octet-stream"}
    try:
        put = server.api("POST", "/files?path=/a/b/c", headers=raw, content=b"\0\xff")
        assert put.status_code == 200, put.text
        assert server.api("GET", "/files?path=/a/b/c", headers=headers).content == b"\0\xff"
    finally:
        server.cli("kill", made["sandboxID"], check=True)


def test_a_configuration_of_an_image_is_honoured(server, tmp_path):
    from tests import corpus

    program = compiled(tmp_path, "gcc", "-static").read_bytes()
    layer = (
        corpus.Layer()
        .add("p", data=program, mode=0o755)
        .add("etc/passwd", data=b"u:x:5:6::/w:/p\n")
    )
    config = {"Entrypoint": ["/p"], "Cmd": ["given"], "User": "u", "WorkingDir": "/w", "Env": ["K=v"],
              "Volumes": {"/data": {}}}  # fmt: skip
    corpus.write(tmp_path / "layout", [layer.folder("w")], config)
    server.cli("image", "pull", f"oci:{tmp_path / 'layout'}", "--name", "configured", check=True)
    done = server.cli("run", "configured")
    assert (done.returncode, done.stdout) == (0, b"hello from /p, uid 5, 2 words\n")
    shown = json.loads(server.cli("image", "inspect", "configured", check=True).stdout)
    assert shown["config"]["user"] == "u" and shown["config"]["env"] == ["K=v"]
