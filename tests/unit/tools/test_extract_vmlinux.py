import gzip
import lzma
import struct
import subprocess
import sys

import pytest
from tools.setup import extract_vmlinux as ev

KERNEL = b"\x7fELF" + b"code" * 5000 + ev.PVH_NOTE


def image(packed):
    head = bytearray(0x400)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 16, len(packed))
    return bytes(head) + bytes(16) + packed + b"behind"


def zstd(data):
    return subprocess.run(["zstd", "-qc"], input=data, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.parametrize(
    "packed",
    [gzip.compress(KERNEL), lzma.compress(KERNEL), zstd(KERNEL) + struct.pack("<I", len(KERNEL))],
)
def test_each_compression(packed):
    assert ev.decompress(ev.payload(image(packed))) == KERNEL


def run(tmp_path, data):
    source, target = tmp_path / "vmlinuz", tmp_path / "vmlinux"
    source.write_bytes(data)
    done = subprocess.run([sys.executable, ev.__file__, source, target], capture_output=True)
    return done, target


def test_what_cannot_boot_is_not_written(tmp_path):
    done, target = run(tmp_path, image(gzip.compress(KERNEL[:-20])))
    assert done.returncode == 1 and b"PVH" in done.stderr and not target.exists()


def test_what_is_no_kernel(tmp_path):
    done, target = run(tmp_path, b"MZ" * 400)
    assert done.returncode and not target.exists()


def test_the_kernel_is_written(tmp_path):
    done, target = run(tmp_path, image(gzip.compress(KERNEL)))
    assert done.returncode == 0 and target.read_bytes() == KERNEL
