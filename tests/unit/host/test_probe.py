import json
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from agentenv.errors import MissingTool
from agentenv.host import probe
from agentenv.host.probe import Access, Memory, Mount, Route
from agentenv.host.process import Completed


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("6.12.95+deb12-cloud-amd64", (6, 12, 95)),
        ("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)", (10, 0, 2)),
        ("mke2fs 1.47.0 (5-Feb-2023)", (1, 47, 0)),
        ("no number here", ()),
        ("", ()),
    ],
)
def test_version_numbers(text, numbers):
    assert probe.version_numbers(text) == numbers


def test_versions_compare_as_numbers_not_as_text():
    assert probe.version_numbers("10.0.2") > probe.version_numbers("8.2")


def test_memory_is_in_bytes():
    text = "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB\nSwapTotal: 512 kB\nOdd:\n"
    assert probe.parse_memory(text) == Memory(2048 << 10, 1024 << 10, 512 << 10)


MOUNTINFO_V2 = """\
23 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
31 23 0:27 / /mnt/with\\040space rw - tmpfs tmpfs rw
"""
MOUNTINFO_V1 = """\
33 32 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
34 32 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 32 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
"""
MOUNTINFO_HYBRID = MOUNTINFO_V1 + "36 32 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def test_mounts_keep_their_order_and_unescape_names():
    assert probe.parse_mounts(MOUNTINFO_V2)[-1] == Mount(Path("/mnt/with space"), "tmpfs", ("rw",))


def test_cgroup_v2():
    found = probe.find_cgroups(probe.parse_mounts(MOUNTINFO_V2), lambda _: "cpu memory pids\n")
    assert found.unified == Path("/sys/fs/cgroup")
    assert found.version_of("memory") == 2
    assert found.version_of("rdma") is None


def test_cgroup_v1_controllers_share_a_mount_and_names_are_no_controllers():
    found = probe.find_cgroups(probe.parse_mounts(MOUNTINFO_V1), lambda _: "cpu")
    assert found.unified is None
    assert found.v1["cpuacct"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert set(found.v1) == {"memory", "cpu", "cpuacct"}
    assert found.version_of("cpu") == 1


def test_a_hybrid_host_has_each_controller_where_it_can_be_used():
    found = probe.find_cgroups(probe.parse_mounts(MOUNTINFO_HYBRID), lambda _: "pids\n")
    assert (found.version_of("memory"), found.version_of("pids")) == (1, 2)


def links(**addresses):
    return json.dumps(
        [
            {
                "ifname": name,
                "addr_info": [{"local": a.split("/")[0], "prefixlen": int(a.split("/")[1])}],
            }
            for name, a in addresses.items()
        ]
    )


def test_routes_come_from_addresses_and_tables_without_loopback_and_defaults():
    routes = json.dumps(
        [
            {"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"},
            {"dst": "198.51.100.0/24", "dev": "tun0"},
            {"type": "local", "dst": "192.0.2.7", "dev": "eth0", "table": "local"},
            {"type": "broadcast", "dst": "192.0.2.255", "dev": "eth0"},
            {"dst": "203.0.113.9", "dev": "eth1"},
        ]
    )
    found = probe.parse_routes(links(lo="127.0.0.1/8", eth0="192.0.2.7/24"), routes)
    assert found == [
        Route(IPv4Network("192.0.2.0/24"), "eth0"),
        Route(IPv4Network("198.51.100.0/24"), "tun0"),
        Route(IPv4Network("203.0.113.9/32"), "eth1"),
    ]


def test_a_host_without_any_network_has_no_routes():
    assert probe.parse_routes("", "") == []


def chains(*chains_):
    return json.dumps({"nftables": [{"metainfo": {}}, *({"chain": c} for c in chains_)]})


@pytest.mark.parametrize(
    ("nft", "legacy", "policy"),
    [
        (chains(), "", "accept"),
        (chains({"name": "FORWARD", "hook": "forward", "policy": "drop"}), "", "drop"),
        (chains({"name": "INPUT", "hook": "input", "policy": "drop"}), "", "accept"),
        (
            chains({"name": "DOCKER"}, {"name": "F", "hook": "forward", "policy": "accept"}),
            "",
            "accept",
        ),
        (chains(), "-P FORWARD DROP\n-A FORWARD -j DOCKER-USER\n", "drop"),
        ("", "-P FORWARD ACCEPT\n", "accept"),
    ],
)
def test_forward_policy(nft, legacy, policy):
    assert probe.forward_policy(nft, legacy) == policy


def fake_root(tmp_path, files):
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_kernel_facts(tmp_path):
    root = fake_root(
        tmp_path,
        {
            "proc/sys/kernel/osrelease": "6.1.0-13-amd64\n",
            "proc/filesystems": "nodev\ttmpfs\n\text4\n",
            "proc/self/status": "Name:\tx\nCapEff:\t000001ffffffffff\n",
            "proc/sys/net/ipv4/ip_forward": "1\n",
            "proc/sys/vm/overcommit_memory": "2\n",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "kvm-clock\n",
            "lib/modules/6.1.0-13-amd64/modules.dep": "kernel/fs/erofs/erofs.ko.xz: x.ko\n",
        },
    )
    kernel = probe.read_kernel(root)
    assert kernel.version == (6, 1, 0)
    assert kernel.filesystems == {"tmpfs", "ext4"}
    assert kernel.capabilities == 0x1FFFFFFFFFF
    assert (kernel.ip_forward, kernel.overcommit, kernel.clocksource) == (True, 2, "kvm-clock")
    assert probe.has_filesystem(kernel, "ext4", root)  # there
    assert probe.has_filesystem(kernel, "erofs", root)  # could be loaded
    assert not probe.has_filesystem(kernel, "ext", root)  # the whole name counts
    assert not probe.has_filesystem(kernel, "overlay", root)


def test_a_kernel_that_says_little_counts_as_zero(tmp_path):
    kernel = probe.read_kernel(tmp_path)
    assert (kernel.release, kernel.version, kernel.capabilities) == ("", (), 0)
    assert not probe.has_filesystem(kernel, "erofs", tmp_path)


def test_unified_controllers_are_read_at_the_mount(tmp_path):
    root = fake_root(
        tmp_path,
        {"proc/self/mountinfo": MOUNTINFO_V2, "sys/fs/cgroup/cgroup.controllers": "cpu io\n"},
    )
    assert probe.read_cgroups(root).unified_controllers == {"cpu", "io"}


def test_disk_of_a_folder_that_is_not_there_yet_and_the_mount_that_covers_it(tmp_path):
    point = str(tmp_path.resolve())
    mountinfo = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 8:2 / {point} rw - xfs /dev/sdb rw\n"
        f"3 1 8:3 / {point} rw - btrfs /dev/sdc rw\n"
        f"4 1 8:4 / {point}x rw - tmpfs tmpfs rw\n"
    )
    root = fake_root(tmp_path / "root", {"proc/self/mountinfo": mountinfo})
    disk = probe.read_disk(tmp_path / "not" / "yet", root)
    assert disk.kind == "btrfs"
    assert 0 < disk.free <= disk.total


def test_disk_in_a_chroot_whose_root_is_no_mount(tmp_path):
    root = fake_root(
        tmp_path / "root", {"proc/self/mountinfo": "1 0 0:5 / /proc rw - proc proc rw\n"}
    )
    disk = probe.read_disk(tmp_path, root)
    assert disk.kind == "unknown"
    assert disk.total > 0


def test_devices(tmp_path):
    assert probe.read_device(tmp_path / "none") is Access.ABSENT
    assert probe.read_device(Path("/dev/null")) is Access.OPENS
    assert probe.read_device(tmp_path) is Access.DENIED


def answering(answers):
    async def call(argv):
        if argv[0] not in answers:
            raise MissingTool(f"{argv[0]} is not installed")
        return answers[argv[0]]

    return call


async def test_a_host_without_legacy_iptables_is_judged_by_nftables_alone():
    nft = chains({"name": "FORWARD", "hook": "forward", "policy": "drop"}).encode()
    assert await probe.read_forward_policy(answering({"nft": Completed(0, nft, b"")})) == "drop"


async def test_legacy_rules_count_where_nft_may_not_list():
    call = answering(
        {
            "nft": Completed(1, b"", b"Operation not permitted"),
            "iptables-legacy": Completed(0, b"-P FORWARD DROP\n", b""),
        }
    )
    assert await probe.read_forward_policy(call) == "drop"


async def test_without_ip_the_routes_are_an_error_not_an_empty_list():
    with pytest.raises(MissingTool):
        await probe.read_routes(answering({}))


async def test_versions_may_be_told_on_the_error_output():
    call = answering({"/sbin/mkfs.ext4": Completed(0, b"", b"mke2fs 1.47.0 (5-Feb-2023)\n")})
    found = await probe.read_version(Path("/sbin/mkfs.ext4"), "-V", call)
    assert found.numbers == (1, 47, 0)


async def test_a_version_of_a_day_is_told_whole():
    call = answering({"/usr/bin/runsc": Completed(0, b"runsc version 0.0~20240729.0\n", b"")})
    found = await probe.read_version(Path("/usr/bin/runsc"), call=call)
    assert found.version == "0.0~20240729.0"


async def test_a_tool_that_does_not_answer_has_no_version():
    async def never(argv):
        raise TimeoutError

    found = await probe.read_version(Path("/bin/x"), call=never)
    assert (found.version, found.numbers) == ("", ())
