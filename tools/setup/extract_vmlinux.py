"""Write the uncompressed ELF kernel inside a bzImage: extract_vmlinux.py VMLINUZ VMLINUX.

An emulated CPU takes about 0.7 s to decompress it at every boot. The payload's place is in the
setup header (Linux, Documentation/arch/x86/boot.rst: setup_sects 0x1f1, payload_offset 0x248,
payload_length 0x24c); its last four bytes are its uncompressed size, for all but gzip.
Ends with 1 if there is no ELF with a PVH entry (note of owner Xen, type 18), which QEMU needs.
"""

from __future__ import annotations

import lzma
import struct
import subprocess
import sys
import zlib
from pathlib import Path

PVH_NOTE = struct.pack("<III", 4, 8, 18) + b"Xen\0"


def payload(image: bytes) -> bytes:
    if image[0x202:0x206] != b"HdrS":
        raise ValueError("no bzImage")
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    return image[start : start + length]


def decompress(data: bytes) -> bytes:
    if data.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(31).decompress(data)
    if data.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(data)
    tools = {b"\x28\xb5\x2f\xfd": "zstd", b"\x02\x21\x4c\x18": "lz4"}
    for magic, tool in tools.items():
        if data.startswith(magic):
            argv = [tool, "-dc"]
            return subprocess.run(argv, input=data[:-4], stdout=subprocess.PIPE, check=True).stdout
    raise ValueError(f"compression {data[:6].hex()} is not known")


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    kernel = decompress(payload(source.read_bytes()))
    if not kernel.startswith(b"\x7fELF") or PVH_NOTE not in kernel:
        sys.exit("the kernel has no PVH entry")
    target.write_bytes(kernel)


if __name__ == "__main__":
    main()
