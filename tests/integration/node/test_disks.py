"""Disks as layers: what a sandbox wrote becomes a layer over the blank, cluster by cluster."""

import subprocess

from tests.blocks import block_folder, block_server
from tests.contract.store.homes import home_on

from agentenv.engine.qemu import disk
from agentenv.layer.layers import BLOCK, DISK_WINDOW
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
    """Through the block server, as another node would read it, and by QEMU's own account."""
    blank = tmp_path / "blank"
    blank.touch()
    await disk.make_blank(blank, SIZE_MIB)
    spans = disk.data_spans(blank)
    assert sum(count for _, count, _ in spans) * BLOCK < 8 << 20  # sparse: most is nowhere
    overlay = tmp_path / "disk.qcow2"
    await disk.make(tmp_path, overlay, SIZE_MIB, 0)
    written = ("write -P 0x11 1M 3M", "write -P 0x22 20000k 4k", "write -P 0 5M 1M")
    qemu_io(overlay, *written, "discard 0 64k", "write -P 0x33 9M 64k", "discard 9M 64k")
    async with (
        home_on(str(tmp_path / "store"), tmp_path / "home") as home,
        block_folder() as folder,
        block_server(folder, str(tmp_path / "store")) as server,
    ):
        below = await write(home, blank, spans)
        above = await write(home, overlay, await disk.written_spans(overlay))
        assert (await home.layers.table(above.layer)).data_bytes <= 3 << 20 | 64 << 10
        layers = [(below.layer, 0), (above.layer, 0)]
        found = (await server.client.open_stack(BLOCKS, layers, "test")).read_bytes()
    both = f"driver=qcow2,file.filename={overlay},backing.driver=raw,backing.file.filename={blank}"
    words = ("qemu-img", "convert", "--image-opts", both, "-O", "raw", tmp_path / "wanted")
    subprocess.run(words, check=True)
    assert found == (tmp_path / "wanted").read_bytes()
    assert found[1 << 20 : 4 << 20] == b"\x11" * (3 << 20)
    assert not any(found[9 << 20 : (9 << 20) + (64 << 10)])


async def test_equal_sizes_make_equal_blanks(tmp_path):
    contents = []
    for name in ("one", "two"):
        path = tmp_path / name
        path.touch()
        await disk.make_blank(path, SIZE_MIB)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
