"""What runsc is told."""

import shlex
from pathlib import Path

from agentenv.engine.contract import Attachment, Limits, MachineSpec
from agentenv.engine.gvisor import bundle

SPEC = MachineSpec(
    sandbox_id="m",
    run_dir=Path("/run/a b/m"),
    root=None,
    disk=Path("/home/m/disk.ext4"),
    disk_base=None,
    vcpus=1,
    memory_mib=256,
    network=Attachment(
        netns=Path("/run/netns/1"),
        tap="tap0",
        mac="02:ae:00:00:00:02",
        address="10.233.0.2/30",
        gateway="10.233.0.1",
        dns=(),
        host_mac="02:ae:00:00:00:01",
    ),
    uid=1,
    gid=1,
    cgroup="m",
    limits=Limits(1 << 28),
)


def test_the_key_is_in_the_environment_and_the_root_writable():
    config = bundle.config(Path("/roots/x"), "secret")
    assert "AENV_CONTROL_KEY=secret" in config["process"]["env"]
    assert config["root"] == {"path": "/roots/x", "readonly": False}
    assert config["process"]["args"] == ["/.agentenv-agent"]


def test_a_start_has_the_disk_and_the_network_around_it():
    words = bundle.start(SPEC, ("runsc", "run", "a b"))
    script = words[-1]
    assert words[:1] == ("unshare",) and "--net" in words
    assert "mount -o loop,noatime /home/m/disk.ext4 '/run/a b/m/upper'" in script
    assert script.endswith(f"exec {shlex.join(('runsc', 'run', 'a b'))}\n")
    slot, _, inner = script.partition("ip -batch - <<END\n")[2].partition("END\n")
    assert "link del tap0" in slot and "addr add 10.233.0.1/30 dev tap0" in slot
    assert "addr add 10.233.0.2/30 dev eth0" in inner and "via 10.233.0.1" in inner


def test_the_platform_is_never_kvm():
    words = bundle.runsc(Path("/bin/runsc"), bundle.RunFiles(SPEC.run_dir), "create", "m")
    assert "--platform=systrap" in words and words[-2:] == ("create", "m")
