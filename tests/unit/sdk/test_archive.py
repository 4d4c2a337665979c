"""Trees as tar streams, against GNU tar; and what a hostile sandbox sends."""

import asyncio
import io
import os
import stat
import subprocess
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import GuestError, UserError
from agentenv.sdk import archive


async def packed(source, name):
    return b"".join([piece async for piece in archive.pack(source, name)])


async def unpack(data, folder, *, name=None, special=False):
    async def pieces():
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    await archive.unpack(pieces(), folder, name=name, special=special)


def tar_of(*entries) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, fields in entries:
            info = tarfile.TarInfo(name)
            data = fields.pop("data", b"")
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def link(target, kind=tarfile.SYMTYPE):
    return {"type": kind, "linkname": target}


@pytest.mark.parametrize("islands", [1, 3, 4, 5, 25, 26, 47])
async def test_gnu_tar_reads_our_holes(tmp_path, islands):
    source, out = tmp_path / ("n" * 150), tmp_path / "out"
    out.mkdir()
    with source.open("wb") as file:
        for number in range(islands):
            file.seek((2 * number + 1) << 16)
            file.write(bytes([number + 1]) * 5000)
        file.truncate((2 * islands + 3) << 16)
    data = await packed(source, source.name)
    assert len(data) < islands * 9000 + 40_000
    subprocess.run(["tar", "-x", "-C", out], input=data, check=True)
    assert (out / source.name).read_bytes() == source.read_bytes()
    assert (out / source.name).stat().st_blocks == source.stat().st_blocks


async def test_a_file_of_nothing_but_holes(tmp_path):
    with (tmp_path / "f").open("wb") as file:
        file.truncate(9 << 33)  # more than eleven octal digits hold
    data = await packed(tmp_path / "f", "f")
    assert len(data) < 20_000
    listed = subprocess.run(["tar", "-tv"], input=data, capture_output=True, check=True)
    assert str(9 << 33).encode() in listed.stdout


async def test_links_times_and_odd_names(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(b"1")
    os.link(tree / "a", tree / "b")
    (tree / os.fsdecode(b"\xff")).write_bytes(b"2")
    (tree / "l").symlink_to("/nowhere")
    os.mkfifo(tree / "p")
    out = tmp_path / "out"
    out.mkdir()
    await unpack(await packed(tree, "tree"), out, name="other")
    back = out / "other"
    assert sorted(os.listdir(back)) == sorted(os.listdir(tree))
    assert (back / "a").stat().st_ino == (back / "b").stat().st_ino
    assert stat.S_ISFIFO((back / "p").lstat().st_mode)


@pytest.mark.parametrize(
    "data",
    [
        tar_of(("../out", {"data": b"x"})),
        tar_of(("/etc/aenv-hostile", {"data": b"x"})),
        tar_of(("a/../../out", {"data": b"x"})),
        tar_of(("l", link("..")), ("l/out", {"data": b"x"})),
        tar_of(("l", link("/etc")), ("l/aenv-hostile", {"data": b"x"})),
        tar_of(("l", link("/etc/passwd")), ("h", link("l", tarfile.LNKTYPE))),
        tar_of(("h", link("/etc/passwd", tarfile.LNKTYPE))),
        tar_of(("h", link("../../etc/passwd", tarfile.LNKTYPE))),
        tar_of(
            ("d", {"type": tarfile.DIRTYPE}),
            ("d", link("/etc")),
            ("d/aenv-hostile", {"data": b"x"}),
        ),
        tar_of(
            ("r", {"type": tarfile.DIRTYPE}),
            ("r/s", link("../../victim")),
            ("r/s", {"type": tarfile.DIRTYPE, "mode": 0o777}),
        ),
        tar_of(("h", link("not-in-the-archive", tarfile.LNKTYPE))),
        tar_of(("f", {"data": b"x"}))[:1024],
        tar_of(("f", {"data": b"x"}))[:1024] + b"damaged header" * 100,
        tar_of(("f", {"data": b"x", "uid": 1 << 50})),
        b"garbage" * 1000,
        tar_of(("cut", {"data": b"x" * 5000}))[:2000],
    ],
)
async def test_what_would_be_written_elsewhere_is_refused(tmp_path, data):
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    victim.mkdir(mode=0o700)
    with pytest.raises((GuestError, UserError)):
        await unpack(data, folder)
    assert not (tmp_path / "out").exists() and not os.path.exists("/etc/aenv-hostile")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "victim"]
    assert victim.stat().st_mode & 0o777 == 0o700


async def test_a_file_here_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "mine").write_bytes(b"precious")
    with pytest.raises(UserError, match="cannot be written"):
        await unpack(tar_of(("d", {"type": tarfile.DIRTYPE})), tmp_path, name="mine")
    assert (tmp_path / "mine").read_bytes() == b"precious"


async def test_times_before_the_epoch_and_trees_deeper_than_python(tmp_path):
    deep = tmp_path / "tree"
    for _ in range(1200):
        deep /= "d"
    subprocess.run(["mkdir", "-p", deep], check=True)
    os.utime(tmp_path / "tree", (-100, -100))
    data = await packed(tmp_path / "tree", "tree")
    (tmp_path / "out").mkdir()
    await unpack(data, tmp_path / "out")
    assert (tmp_path / "out" / "tree").stat().st_mtime == 0
    # pytest's own removal is recursive.
    subprocess.run(["rm", "-r", tmp_path / "tree", tmp_path / "out"], check=True)


async def test_setuid_and_devices_come_only_if_asked_for(tmp_path):
    data = tar_of(
        ("tool", {"mode": 0o4755, "data": b"x"}),
        ("null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3, "mode": 0o666}),
    )
    for special in (False, True):
        folder = tmp_path / str(special)
        folder.mkdir()
        await unpack(data, folder, special=special)
        assert bool((folder / "tool").stat().st_mode & stat.S_ISUID) == special
        assert (folder / "null").exists() == special


async def test_who_leaves_early_leaves_no_thread_behind(tmp_path):
    (tmp_path / "big").write_bytes(bytes(20 << 20))
    stream = archive.pack(tmp_path / "big", "big")
    assert await anext(stream)
    async with asyncio.timeout(10):
        await stream.aclose()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 1 << 50), st.integers(1, 1 << 40)), max_size=60))
def test_headers_of_any_extents_are_whole_blocks_that_python_reads(extents):
    info = tarfile.TarInfo("n" * 120)
    info.size = 1 << 60
    data = b"".join(archive.sparse_header(info, extents))
    assert len(data) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(data + bytes(1024)), mode="r|") as tar:
        read = tar.next()
    assert read is not None and read.size == 1 << 60
    assert [pair for pair in read.sparse or () if pair[1]] == extents  # pyright: ignore
