import itertools
import json
from pathlib import Path

import pytest

from agentenv.engine.contract import Attachment, FlatSource, Limits, MachineSpec
from agentenv.engine.qemu.argv import (
    Guest,
    RunFiles,
    boot,
    disks,
    kernel_line,
    memory,
    vmdk,
    wait,
    writable,
)

GUEST = Guest(Path("/q"), Path("/k"), Path("/i"), "tcg", 2_596_000)
NET = Attachment(Path("/ns"), "tap0", "02:ae:00:00:00:02", "10.0.0.2/30", "10.0.0.1", ())


def spec(network=NET, segments=("/a", "/b"), **more):
    return MachineSpec(
        "sbx", Path("/run/x"), FlatSource(tuple(Path(s) for s in segments)), Path("/d.qcow2"),
        Path("/blank"), 1, 512, network, 900_001, 900_001, "sbx", Limits(1 << 30), **more,
    )  # fmt: skip


def words(guest=GUEST, start=boot, **more):
    return start(guest, spec(**more), RunFiles(Path("/run/x")))


@pytest.mark.parametrize("start", [boot, wait])
def test_the_devices_come_in_a_fixed_order(start):
    line = words(start=start)
    devices = [a.split(",")[0] for f, a in itertools.pairwise(line) if f == "-device"]
    assert devices == [
        "virtio-blk-device", "virtio-blk-device", "virtio-net-device", "virtio-serial-device",
        "virtserialport", "virtio-rng-device", "virtio-balloon-device",
    ]  # fmt: skip


def test_it_is_confined():
    line = " ".join(words())
    assert (
        "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny" in line
    )
    assert "-nodefaults" in line and "-no-user-config" in line


def nodes(**more):
    return {node["node-name"]: node for node in disks(spec(**more), RunFiles(Path("/run/x")))}


def test_one_segment_is_read_as_it_is_and_several_through_a_descriptor():
    assert nodes(segments=("/only",))["root"]["driver"] == "raw"
    assert nodes()["root"]["file"]["filename"] == "/run/x/root.vmdk"


def test_the_root_is_read_only_and_the_disk_stops_on_errors():
    assert nodes()["root"]["read-only"] and nodes()["root"]["file"]["read-only"]
    line = " ".join(words())
    assert "drive=root,serial=root,rerror=stop" in line
    assert "drive=disk,serial=disk,discard=on,rerror=stop,werror=stop" in line


def test_the_disk_lies_over_a_base_that_is_only_read():
    found = nodes()
    assert found["base"]["file"]["filename"] == "/blank" and found["base"]["read-only"]
    assert found["disk"]["backing"] == "base" and list(found)[-1] == "disk"
    booted = words()
    assert all(json.dumps(node) in booted for node in found.values())


def test_disks_that_are_written_no_more_lie_between():
    found = nodes(disk_below=(Path("/one.qcow2"), Path("/two.qcow2")))
    assert list(found) == ["root", "base", "below0", "below1", "disk"]
    assert [found[n].get("backing") for n in list(found)[2:]] == ["base", "below0", "below1"]
    assert found["below1"]["read-only"]
    assert writable("disk-2", Path("/x"), None)["backing"] is None  # put over another later


def test_a_machine_that_waits_has_no_kernel_memory_or_disks_yet():
    line = words(start=wait)
    assert line[-4:] == ("--preconfig", "-S", "-incoming", "defer")
    assert not {"-kernel", "-blockdev"} & set(line) and "ram0" not in " ".join(line)
    assert memory(spec(), RunFiles(Path("/run/x")))["mem-path"] == "/run/x/memory/ram"
    assert "memory-backend=ram0" in " ".join(words()) and "-incoming" not in words()


def test_no_network_device_without_a_network():
    assert "virtio-net" not in " ".join(words(network=None))


@pytest.mark.parametrize(("accelerator", "cpu"), [("kvm", "host"), ("tcg", "max")])
def test_the_cpu_follows_the_accelerator(accelerator, cpu):
    guest = Guest(Path("/q"), Path("/k"), Path("/i"), accelerator, 1)
    line = words(guest)
    assert line[line.index("-cpu") + 1] == cpu
    assert ("mitigations=off" in " ".join(line)) == (accelerator == "tcg")


def test_the_kernel_is_told_the_time_it_cannot_measure():
    line = kernel_line(GUEST, ("extra=1",))
    assert "tsc_early_khz=2596000" in line and "no_timer_check" in line and line.endswith("extra=1")


def test_a_descriptor_names_each_extent_once():
    text = vmdk(((Path("/a"), 4096), (Path("/b"), 8192)))
    lines = text.splitlines()
    extents = [line for line in lines if line.startswith("RW ")]
    assert extents == ['RW 8 FLAT "/a" 0', 'RW 16 FLAT "/b" 0']
    assert lines[lines.index(extents[0]) - 1], "an empty line would double the first extent"


@pytest.mark.parametrize(("path", "size"), [('/a"b', 512), ("/a", 100)])
def test_a_segment_that_cannot_be_described(path, size):
    with pytest.raises(ValueError, match="cannot be an extent"):
        vmdk(((Path(path), size),))
