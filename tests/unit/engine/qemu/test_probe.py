import json

import pytest

from agentenv.engine.qemu import probe


def qemu(tmp_path, script):
    """A program in QEMU's place that counts how often it was asked."""
    path = tmp_path / "qemu"
    path.write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def device(tmp_path, monkeypatch):
    path = tmp_path / "kvm"
    path.touch()
    monkeypatch.setattr(probe, "DEVICE", path)
    return path


async def ask(tmp_path, program):
    return await probe.kvm(tmp_path, program, "10.0", lambda: tmp_path, tmp_path)


async def test_a_guest_that_reaches_init_proves_kvm(tmp_path, device):
    verdict = await ask(tmp_path, qemu(tmp_path, "echo agentenv-init: no disk"))
    assert verdict.works


async def test_a_guest_that_does_not_is_quoted(tmp_path, device):
    verdict = await ask(tmp_path, qemu(tmp_path, "echo kvm_buf_set_msrs: Assertion >&2; exit 1"))
    assert not verdict.works and "kvm_buf_set_msrs" in verdict.reason


async def test_a_guest_that_hangs_is_given_up(tmp_path, device, monkeypatch):
    monkeypatch.setattr(probe, "DEADLINE", 0.2)
    verdict = await ask(tmp_path, qemu(tmp_path, "exec sleep 60"))
    assert not verdict.works and "within 0.2 s" in verdict.reason


async def test_no_device_no_boot(tmp_path, device):
    device.unlink()
    verdict = await ask(tmp_path, qemu(tmp_path, "echo agentenv-init"))
    assert not verdict.works and not (tmp_path / "asked").exists()


async def test_the_verdict_is_remembered_for_this_boot_and_qemu(tmp_path, device):
    program = qemu(tmp_path, "echo agentenv-init")
    for _ in range(3):
        assert (await ask(tmp_path, program)).works
    assert (tmp_path / "asked").read_text().count("x") == 1
    memory = tmp_path / "kvm.json"
    memory.write_text(json.dumps({**json.loads(memory.read_text()), "boot_id": "former"}))
    await ask(tmp_path, program)
    memory.write_text("damaged")
    await ask(tmp_path, program)
    assert (tmp_path / "asked").read_text().count("x") == 3
