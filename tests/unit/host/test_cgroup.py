import pytest

from agentenv.host.cgroup import GroupLimits, detect, v1_values, v2_values

V1 = """\
tmpfs /sys/fs/cgroup tmpfs ro 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
"""


def test_limits_in_the_words_of_v1():
    values = v1_values(GroupLimits(1 << 30, 64, cpu_weight=200, cpu_quota=1.5))
    assert values["cpu"] == {"cpu.shares": "2048", "cpu.cfs_quota_us": "150000"}
    assert values["memory"] == {"memory.limit_in_bytes": str(1 << 30)}
    assert values["pids"] == {"pids.max": "64"}
    assert v1_values(GroupLimits(1, 1))["cpu"]["cpu.cfs_quota_us"] == "-1"


def test_limits_in_the_words_of_v2():
    values = v2_values(GroupLimits(1 << 30, 64, cpu_weight=200, cpu_quota=0.5))
    assert values["cpu"] == {"cpu.weight": "200", "cpu.max": "50000 100000"}
    assert values["memory"] == {"memory.max": str(1 << 30), "memory.oom.group": "1"}
    assert v2_values(GroupLimits(1, 1))["cpu"]["cpu.max"] == "max 100000"


def test_a_hybrid_host_is_v1_and_names_what_it_lacks():
    layout = detect(V1)
    assert not layout.unified and layout.missing == ("pids",)
    assert str(layout.roots["cpu"]) == "/sys/fs/cgroup/cpu,cpuacct"


def test_a_v2_host_offers_what_its_root_lists(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    layout = detect(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert layout.unified and layout.missing == ("pids",)


@pytest.mark.parametrize("mounts", ["tmpfs / tmpfs rw 0 0\n"])
def test_a_host_without_any(mounts):
    assert detect(mounts).missing == ("cpu", "memory", "pids")
