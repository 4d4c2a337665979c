"""Boot the guest kernel and measure what each module costs; mount a flat merged EROFS image.

Claims it holds: the modules of modules.load insert in their order; a metadata image followed by
its layers in one flat file mounts in the guest as the merged root; the figures of decision 031.
Runs unprivileged, needs `make setup` and busybox-static. One run takes about ten seconds under TCG.

    .venv/bin/python tools/probes/guest_boot.py [--kvm] [--runs 3]
"""

from __future__ import annotations

import argparse
import gzip
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from agentenv.host.tools import GuestKernel, Tools

DEADLINE = 120.0  # seconds for one boot
CLOCK = "read up _ </proc/uptime; echo"
INIT = f"""#!/bin/sh
mount -t proc proc /proc; mount -t devtmpfs dev /dev
{CLOCK} "@init $up"
while read -r name; do
    insmod /modules/$name || echo "@failed $name"
    {CLOCK} "@module $up $name"
done </modules.load
mount -t erofs -o ro /dev/vda /mnt && echo "@lower $(cat /mnt/lower.txt)"
echo "@upper $(cat /mnt/upper.txt)"
{CLOCK} "@end $up"
poweroff -f
"""


def newc(files: dict[str, tuple[int, bytes]]) -> bytes:
    """A cpio archive (new ASCII format) of path -> (mode with type bits, content)."""
    out = io.BytesIO()
    for inode, (name, (mode, data)) in enumerate(
        [*files.items(), ("TRAILER!!!", (0, b""))], start=1
    ):
        encoded = name.encode() + b"\0"
        numbers = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        out.write(b"070701" + b"".join(b"%08X" % number for number in numbers) + encoded)
        out.write(b"\0" * (-out.tell() % 4) + data)
        out.write(b"\0" * (-out.tell() % 4))
    return out.getvalue()


def initramfs(kernel: GuestKernel, busybox: bytes) -> bytes:
    directory, program, plain, link = 0o040755, 0o100755, 0o100644, 0o120777
    files: dict[str, tuple[int, bytes]] = dict.fromkeys(
        ("bin", "proc", "dev", "mnt", "modules"), (directory, b"")
    )
    files |= {"init": (program, INIT.encode()), "bin/busybox": (program, busybox)}
    for applet in ("sh", "mount", "insmod", "cat", "echo", "poweroff"):
        files[f"bin/{applet}"] = (link, b"busybox")
    files["modules.load"] = (plain, "".join(f"{m.name}\n" for m in kernel.modules).encode())
    files |= {f"modules/{m.name}": (plain, m.read_bytes()) for m in kernel.modules}
    return gzip.compress(newc(files), 1)


def layer(folder: Path, tools: Tools, name: str) -> Path:
    """An EROFS layer holding one file, made from a tar as layers are."""
    tar, image = folder / f"{name}.tar", folder / f"{name}.erofs"
    with tarfile.open(tar, "w") as archive:
        entry = tarfile.TarInfo(f"{name}.txt")
        entry.size = 5000 + len(name)
        archive.addfile(entry, io.BytesIO(name.encode() + b" " * 5000))
    options = ["--quiet", "--aufs", "-Enoinline_data", "--tar=f"]
    subprocess.run([tools.find("mkfs.erofs"), *options, image, tar], check=True)
    return image


def flat_image(folder: Path, tools: Tools) -> Path:
    layers = [layer(folder, tools, name) for name in ("lower", "upper")]
    merged, flat = folder / "merged.erofs", folder / "flat"
    mkfs = [tools.find("mkfs.erofs"), "--quiet", "--ovlfs-strip=1", merged, *layers]
    subprocess.run(mkfs, check=True)
    flat.write_bytes(b"".join(part.read_bytes() for part in (merged, *layers)))
    return flat


def boot(tools: Tools, initrd: Path, flat: Path, kvm: bool) -> tuple[float, str]:
    """Seconds from the start of QEMU to its end, and what the guest wrote on its console."""
    arguments = "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable"
    argv = [
        *(tools.find("qemu-system-x86_64"), "-M", "microvm,rtc=on,isa-serial=on,acpi=on"),
        *("-accel", "kvm" if kvm else "tcg", "-cpu", "host" if kvm else "max"),
        *("-m", "512", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-serial", "stdio", "-kernel", tools.kernel().image, "-initrd", initrd),
        *("-append", arguments, "-device", "virtio-blk-device,drive=root"),
        *("-drive", f"id=root,if=none,format=raw,readonly=on,file={flat}"),
    ]
    begun = time.monotonic()
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE
    )
    if done.returncode:
        sys.exit(f"QEMU ended with {done.returncode}: {done.stderr}")
    return time.monotonic() - begun, done.stdout


def costs(console: str) -> dict[str, float]:
    """Milliseconds of guest time per module, and of the kernel until its first program."""
    found = re.findall(r"@(init|module|end) (\d+\.\d+) ?(\S*)", console)
    table, before = {"kernel until init": 1000 * float(found[0][1])}, float(found[0][1])
    for kind, up, name in found[1:]:
        table[name if kind == "module" else "mount and read"] = 1000 * (float(up) - before)
        before = float(up)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvm", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    tools = Tools.from_environ()
    kernel = tools.kernel()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "initrd").write_bytes(initramfs(kernel, tools.find("busybox").read_bytes()))
        flat = flat_image(folder, tools)
        runs = [boot(tools, folder / "initrd", flat, args.kvm) for _ in range(args.runs)]
        size = (folder / "initrd").stat().st_size
    for _, console in runs:
        if "@failed" in console or "@lower lower" not in console or "@upper upper" not in console:
            sys.exit(f"the guest did not do as claimed:\n{console}")
    print(f"guest kernel {kernel.version}, initramfs {size / 1e6:.2f} MB, {args.runs} runs")
    for name in costs(runs[0][1]):
        samples = [costs(console)[name] for _, console in runs]
        print(f"{name:24} {statistics.median(samples):7.0f} ms")
    print(f"{'all, host time':24} {1000 * statistics.median(t for t, _ in runs):7.0f} ms")


if __name__ == "__main__":
    main()
