from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from agentenv.config import Config
from agentenv.errors import InfraError, MissingTool
from agentenv.host.probe import Access, Cgroups, Disk, Kernel, Memory, Route, ToolVersion
from agentenv.host.tools import GuestKernel, Tools
from agentenv.node import doctor
from agentenv.node.doctor import GIB, MIB

ALL_CAPABILITIES = (1 << 41) - 1
KERNEL = Kernel(
    release="6.1.0-13-amd64",
    cpus=2,
    filesystems=frozenset({"overlay"}),
    capabilities=ALL_CAPABILITIES,
    ip_forward=True,
    overcommit=0,
    clocksource="tsc",
)
UPLINK = IPv4Network("10.234.0.0/16")
INNER = IPv4Network("10.233.0.0/30")


def test_a_kernel_that_is_too_old_fails_and_says_which_would_do():
    finding = doctor.judge_kernel(replace(KERNEL, release="4.19.0-26-amd64"))
    assert finding.verdict == "fail"
    assert "5.10" in finding.remedy
    assert doctor.judge_kernel(KERNEL).verdict == "ok"


@pytest.mark.parametrize("bit", doctor.NEEDED_CAPABILITIES)
def test_each_needed_capability_is_missed_by_name(bit):
    finding = doctor.judge_privileges(replace(KERNEL, capabilities=ALL_CAPABILITIES ^ 1 << bit))
    assert finding.verdict == "fail"
    assert doctor.NEEDED_CAPABILITIES[bit] in finding.found


def test_root_has_all_privileges():
    assert doctor.judge_privileges(KERNEL).verdict == "ok"


def test_strict_overcommit_is_warned_about():
    assert doctor.judge_overcommit(replace(KERNEL, overcommit=2)).verdict == "warn"
    assert doctor.judge_overcommit(KERNEL).verdict == "ok"


def test_the_device_alone_proves_nothing():
    finding = doctor.judge_kvm(Access.OPENS, works=False, reason="the guest hung")
    assert finding.verdict == "warn"
    assert "the guest hung" in finding.found
    assert doctor.judge_kvm(Access.OPENS, works=True, reason="").verdict == "ok"


@pytest.mark.parametrize(
    ("access", "word"),
    [(Access.ABSENT, "kvm_intel"), (Access.DENIED, "group kvm"), (Access.OPENS, "nested")],
)
def test_each_state_of_the_device_has_its_own_remedy(access, word):
    assert word in doctor.judge_kvm(access, works=False, reason="").remedy


BROKEN = InfraError("gVisor runs nothing here", why="EPERM")


@pytest.mark.parametrize(
    ("wanted", "kvm", "gvisor", "verdict", "said"),
    [
        ("auto", True, BROKEN, "ok", "qemu with KVM"),
        ("auto", False, None, "ok", "gvisor, at native speed"),
        ("auto", False, BROKEN, "warn", "emulated"),
        ("gvisor", True, BROKEN, "fail", "EPERM"),
        ("qemu", False, None, "ok", "the configuration"),
    ],
)
def test_the_engine_that_a_node_would_take(wanted, kvm, gvisor, verdict, said):
    finding = doctor.judge_engine(wanted, kvm, gvisor)
    assert finding.verdict == verdict and said in finding.found
    assert bool(finding.remedy) == (verdict != "ok")


@pytest.mark.parametrize(
    ("available", "rooms", "verdict"),
    [
        (doctor.SERVER_MEMORY + 512 * MIB - 1, 0, "fail"),
        (doctor.SERVER_MEMORY + 512 * MIB, 1, "ok"),
        (doctor.SERVER_MEMORY + 1535 * MIB, 2, "ok"),
        (0, 0, "fail"),
    ],
)
def test_memory_counts_whole_sandboxes_beside_the_server(available, rooms, verdict):
    finding = doctor.judge_memory(Memory(4 * GIB, available, 0), 512 * MIB)
    assert finding.verdict == verdict
    assert f" {rooms} sandboxes" in finding.found


@pytest.mark.parametrize(
    ("free", "kind", "verdict"),
    [
        (doctor.LEAST_DISK, "ext4", "ok"),
        (doctor.LEAST_DISK - 1, "ext4", "fail"),
        (doctor.LEAST_DISK * 9, "tmpfs", "warn"),
    ],
)
def test_disk(free, kind, verdict):
    finding = doctor.judge_disk(Disk(Path("/var/lib/agentenv"), 100 * GIB, free, kind))
    assert finding.verdict == verdict
    assert bool(finding.remedy) == (verdict != "ok")


def test_cgroups_of_either_version_or_both_will_do():
    hybrid = Cgroups(
        Path("/sys/fs/cgroup"),
        frozenset({"pids"}),
        {"cpu": Path("/c"), "memory": Path("/m")},
    )
    finding = doctor.judge_cgroups(hybrid)
    assert (finding.verdict, finding.found) == ("ok", "cpu: v1, memory: v1, pids: v2")


def test_a_missing_controller_is_named():
    lacking = Cgroups(Path("/sys/fs/cgroup"), frozenset({"cpu", "pids"}), {})
    finding = doctor.judge_cgroups(lacking)
    assert finding.verdict == "fail"
    assert finding.found.startswith("no controller memory")


@pytest.mark.parametrize(
    ("tun", "fuse", "verdict"),
    [
        (Access.OPENS, Access.OPENS, "ok"),
        (Access.OPENS, Access.ABSENT, "warn"),
        (Access.DENIED, Access.OPENS, "fail"),
        (Access.ABSENT, Access.ABSENT, "fail"),
    ],
)
def test_devices(tun, fuse, verdict):
    assert doctor.judge_devices(tun, fuse).verdict == verdict


def test_a_file_system_that_is_missing_is_no_more_than_a_warning():
    finding = doctor.judge_filesystems({"erofs": False, "overlay": True})
    assert finding.verdict == "warn"
    assert "erofs" in finding.remedy and "overlay" not in finding.remedy
    assert doctor.judge_filesystems({"erofs": True}).verdict == "ok"


def route(network, device="eth0"):
    return Route(IPv4Network(network), device)


@pytest.mark.parametrize(
    ("network", "verdict"),
    [
        ("192.0.2.0/24", "ok"),
        ("10.0.0.0/8", "fail"),  # a wider one holds ours
        ("10.234.7.0/24", "fail"),  # a narrower one lies in it
        ("10.234.0.4/31", "ok"),  # one of our slots
        ("10.234.0.4/32", "ok"),
        ("10.235.0.0/16", "ok"),  # the neighbour
    ],
)
def test_uplink_overlap(network, verdict):
    finding = doctor.judge_uplink(UPLINK, [route(network, "eth7")])
    assert finding.verdict == verdict
    if verdict == "fail":
        assert f"{network} (eth7)" in finding.found


def test_inner_addresses_that_exist_outside_are_hidden_not_broken():
    assert doctor.judge_inner(INNER, UPLINK, [route("10.233.0.0/24")]).verdict == "warn"
    assert doctor.judge_inner(INNER, UPLINK, [route("192.0.2.0/24")]).verdict == "ok"


def test_our_own_ranges_must_not_overlap():
    finding = doctor.judge_inner(INNER, IPv4Network("10.0.0.0/8"), [])
    assert finding.verdict == "fail"


def test_dockers_policy_is_said_by_name():
    assert "Docker" in doctor.judge_forwarding("drop", True).found
    assert "Docker" not in doctor.judge_forwarding("accept", True).found


QEMU = next(wanted for wanted in doctor.WANTED if wanted.name == "qemu-system-x86_64")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("10.0.2", "ok"), ("8.2.0", "ok"), ("8.2", "ok"), ("7.2.22", "fail"), ("", "fail")],
)
def test_tool_versions(version, verdict):
    finding = doctor.judge_tool(QEMU, ToolVersion(Path("/usr/bin/qemu"), version))
    assert finding.verdict == verdict
    assert bool(finding.remedy) == (verdict != "ok")


@pytest.mark.parametrize("wanted", doctor.WANTED, ids=lambda wanted: wanted.name)
def test_a_missing_tool_says_what_for_and_the_remedy(wanted):
    finding = doctor.judge_tool(wanted, None)
    assert finding.verdict == wanted.without
    assert wanted.purpose in finding.found
    assert "make setup" in finding.remedy


@pytest.mark.parametrize(("release", "verdict"), [("6.9.0", "ok"), ("6.1.0-1-amd64", "warn")])
def test_a_kernel_that_does_not_deliver_reads_again(release, verdict):
    assert doctor.judge_block_server(replace(KERNEL, release=release)).verdict == verdict


async def test_a_remote_store_is_asked_and_a_directory_left_alone(tmp_path):
    config = Config(home=tmp_path / "home", store="s3://bucket?endpoint=http://127.0.0.1:1")
    fault = await doctor._ask_store(config.store_url)
    finding = doctor.judge_store(config.store_url, fault)
    assert finding.verdict == "fail" and "127.0.0.1:1" in finding.found and finding.remedy
    own = Config(home=tmp_path / "home")
    assert await doctor._ask_store(own.store_url) is None and not own.home.exists()
    assert doctor.judge_store(own.store_url, None).verdict == "ok"


def test_guest_kernel():
    kernel = GuestKernel(Path("/k/vmlinuz"), (Path("/k/a.ko"),), "6.12")
    assert doctor.judge_guest_kernel(kernel).verdict == "ok"
    missing = doctor.judge_guest_kernel(MissingTool("no kernel", why="no file", fix="make setup"))
    assert (missing.verdict, missing.remedy) == ("fail", "make setup")


async def works():
    return True, "booted in 0.4 s"


async def lacks_runsc():
    raise MissingTool("runsc is missing")


async def test_examine_never_raises_for_what_is_missing(tmp_path):
    async def cannot_ask():
        raise InfraError("no guest kernel")

    nowhere = Tools(folder=tmp_path / "none", binaries=(tmp_path / "none",), path="")
    findings = await doctor.examine(Config(home=tmp_path), nowhere, cannot_ask, lacks_runsc)
    by_name = {finding.name: finding for finding in findings}
    assert by_name["guest kernel"].verdict == "fail"
    assert by_name["agentenv-edge"].verdict == "fail"
    assert "not probed: no guest kernel" in by_name["kvm"].found


async def test_examine_names_each_fact_once_and_gives_a_remedy_to_each_fault(tmp_path):
    findings = await doctor.examine(Config(home=tmp_path), Tools.from_environ(), works, lacks_runsc)
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    assert {"kernel", "kvm", "memory", "disk", "cgroups", "qemu-system-x86_64"} <= set(names)
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")
