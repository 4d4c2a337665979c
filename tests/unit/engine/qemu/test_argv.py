import itertools
from pathlib import Path

import pytest

from agentenv.engine.contract import Attachment, FlatSource, Limits, MachineSpec
from agentenv.engine.qemu.argv import Guest, RunFiles, boot, kernel_line, restore, vmdk, writable

GUEST = Guest(Path("/q"), Path("/k"), Path("/i"), "tcg", 2_596_000)
NET = Attachment(Path("/ns"), "tap0", "02:ae:00:00:00:02", "10.0.0.2/30", "10.0.0.1", ())


def spec(network=NET, segments=("/a", "/b"), **more):
    return MachineSpec(
        "sbx", Path("/run/x"), FlatSource(tuple(Path(s) for s in segments)), Path("/d.qcow2"),
        Path("/blank"), 1, 512, network, 900_001, 900_001, "sbx", Limits(1 << 30), **more,
    )  # fmt: skip


def words(guest=GUEST, start=boot, **more):
    return start(guest, spec(**more), RunFiles(Path("/run/x")))


@pytest.mark.parametrize("start", [boot, restore])
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


def test_one_segment_is_read_as_it_is_and_several_through_a_descriptor():
    assert "driver=raw" in " ".join(words(segments=("/only",)))
    assert "file.filename=/run/x/root.vmdk" in " ".join(words())


def test_the_root_is_read_only_and_the_disk_stops_on_errors():
    line = " ".join(words())
    assert "node-name=root,read-only=on" in line
    assert "drive=root,serial=root,rerror=stop" in line
    assert "rerror=stop,werror=stop" in line


def test_the_disk_lies_over_a_base_that_is_only_read():
    line = " ".join(words())
    assert "node-name=base,read-only=on,file.driver=file,file.filename=/blank" in line
    assert '"node-name": "disk", "backing": "base"' in line


def test_disks_that_are_written_no_more_lie_between():
    line = " ".join(words(disk_below=(Path("/one.qcow2"), Path("/two.qcow2"))))
    assert "node-name=below0,backing=base,read-only=on" in line
    assert "node-name=below1,backing=below0,read-only=on" in line
    assert '"node-name": "disk", "backing": "below1"' in line
    assert writable("disk-2", Path("/x"), None)["backing"] is None  # put over another later


def test_a_restored_machine_waits_and_has_no_kernel():
    line = words(start=restore)
    assert line[-3:] == ("-S", "-incoming", "defer") and "-kernel" not in line
    assert "mem-path=/run/x/memory/ram,share=off" in " ".join(line)
    assert "memory-backend-memfd" in " ".join(words()) and "-incoming" not in words()


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
