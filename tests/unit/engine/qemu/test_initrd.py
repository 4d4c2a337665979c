import shutil
import subprocess

import pytest

from agentenv.engine.qemu import initrd


def test_another_program_reads_the_archive(tmp_path):
    cpio = shutil.which("busybox")
    assert cpio, "run: make setup"
    data = initrd.archive(b"\x7fELF agent", [("a.ko", b"one"), ("b.ko", b"two!!")])
    subprocess.run([cpio, "cpio", "-idm"], input=data, cwd=tmp_path, check=True)
    assert (tmp_path / "init").read_bytes() == b"\x7fELF agent"
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "modules.load").read_text() == "a.ko\nb.ko\n"
    assert (tmp_path / "modules/b.ko").read_bytes() == b"two!!"
    assert (tmp_path / "dev/console").is_char_device()


@pytest.fixture
def parts(tmp_path):
    module = tmp_path / "a.ko"
    module.write_bytes(b"module")
    agent = tmp_path / "agent"
    agent.write_bytes(b"agent")
    return tmp_path, agent, (module,)


def test_it_is_made_once_per_content(parts):
    folder, agent, modules = parts
    first = initrd.ensure(folder, agent, modules)
    inode = first.stat().st_ino
    assert initrd.ensure(folder, agent, modules) == first and first.stat().st_ino == inode
    agent.write_bytes(b"newer")
    assert initrd.ensure(folder, agent, modules) != first
    assert not list(folder.glob(".*"))
