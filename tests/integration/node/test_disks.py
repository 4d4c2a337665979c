"""Disks as layers: what a sandbox wrote becomes a layer over the blank, cluster by cluster."""

import subprocess

from tests.contract.store.homes import home_on

from agentenv.engine.qemu import disk
from agentenv.layer.layers import BLOCK, DISK_WINDOW, Part
from agentenv.store import lease as leases

SIZE_MIB = 64
BLOCKS = (SIZE_MIB << 20) // BLOCK


def qemu_io(path, *commands):
    words = [word for command in commands for word in ("-c", command)]
    subprocess.run(["qemu-io", "-f", "qcow2", *words, path], check=True, capture_output=True)


async def write(home, path, spans):
    async with leases.hold(home.objects) as lease:
        return await home.layers.write(path, spans, BLOCKS, DISK_WINDOW, lease)


async def test_a_written_disk_is_its_blank_with_a_layer_over_it(tmp_path):
    blank = tmp_path / "blank"
    blank.touch()
    await disk.make_blank(blank, SIZE_MIB)
    spans = disk.data_spans(blank)
    assert sum(count for _, count, _ in spans) * BLOCK < 8 << 20  # sparse: most is nowhere
    overlay = tmp_path / "disk.qcow2"
    await disk.make(tmp_path, overlay, SIZE_MIB, 0)
    qemu_io(overlay, "write -P 0x11 1M 3M", "write -P 0x22 20000k 4k", "write -P 0 8M 1M")
    async with home_on(str(tmp_path / "store"), tmp_path / "home") as home:
        below = await write(home, blank, spans)
        sealed = await write(home, overlay, await disk.written_spans(overlay))
        found = await flat(home, [below, sealed], tmp_path / "flat")
        table = await home.layers.table(sealed.layer)
        assert table.data_bytes < 4 << 20
    wanted = tmp_path / "wanted"
    words = ("-f", "qcow2", "-O", "raw", "--image-opts")
    source = (
        f"driver=qcow2,file.filename={overlay},backing.driver=raw,backing.file.filename={blank}"
    )
    subprocess.run(["qemu-img", "convert", *words[2:], source, wanted], check=True)
    assert found.read_bytes() == wanted.read_bytes()


async def flat(home, layers: list[Part], path):
    """Layers over one another, the last on top: holes let through what lies below."""
    content = bytearray(BLOCKS * BLOCK)
    for part in layers:
        one = path.with_name("one")
        one.unlink(missing_ok=True)
        await home.layers.unpack([part], one)
        data = one.read_bytes()
        for first, count, _ in disk.data_spans(one):
            at = slice(first * BLOCK, (first + count) * BLOCK)
            content[at] = data[at]
    path.write_bytes(content)
    return path


async def test_equal_sizes_make_equal_blanks(tmp_path):
    contents = []
    for name in ("one", "two"):
        path = tmp_path / name
        path.touch()
        await disk.make_blank(path, SIZE_MIB)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
