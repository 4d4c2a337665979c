"""Tars, folders and Debian suites as images."""

import gzip
import os
import socket

import pytest
from tests import corpus
from tests.library import nothing_stored

from agentenv.errors import ImageError
from agentenv.layer.verify import verify


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "d").mkdir(parents=True)
    (root / "d/file").write_bytes(b"x" * 5000)
    os.link(root / "d/file", root / "linked")
    (root / "sym").symlink_to("d/file")
    os.mkfifo(root / "fifo")
    os.mknod(root / "null", 0o020666, os.makedev(1, 3))
    os.setxattr(root / "d/file", "user.note", b"\xff\0")
    os.chown(root / "d", 5, 6)
    (root / os.fsdecode(b"caf\xe9")).write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(root / "socket"))
    return root


async def test_a_folder_keeps_everything_but_sockets(catalog, tree, tmp_path, library):
    image = await catalog.pull(f"dir:{tree}")
    verdict = await verify(library.layers, image, catalog.settings)
    assert verdict.differences == () and verdict.source == "the same"
    assert verdict.entries == 8  # root, d, file, linked, sym, fifo, null, café
    assert image.config.cmd == ("/bin/sh",)


async def test_an_unchanged_folder_is_the_same_image(catalog, tree):
    first = await catalog.pull(f"dir:{tree}")
    assert (await catalog.pull(f"dir:{tree}")).id == first.id
    (tree / "more").write_bytes(b"y")
    assert (await catalog.pull(f"dir:{tree}")).id != first.id


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
async def test_a_tar_is_one_layer(catalog, tmp_path, pack):
    path = tmp_path / "root.tar"
    path.write_bytes(pack(corpus.base_layer().tar()))
    image = await catalog.pull(f"tar:{path}")
    assert len(image.diff_ids) == 1 and image.digest == image.diff_ids[0]


@pytest.mark.parametrize("reference", ["tar:{}/none", "dir:{}/none", "oci:{}/none", "tar:{}"])
async def test_what_is_not_there(catalog, tmp_path, reference):
    with pytest.raises(ImageError) as caught:
        await catalog.pull(reference.format(tmp_path))
    assert (caught.value.code, caught.value.http_status) == ("image_not_found", 404)


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"no tar" * 500, "layer_invalid"), (b"", "image_invalid"),
     (corpus.Layer().add("../x").tar(), "image_path_escape"),
     (corpus.Layer().add("a", data=b"x" * 9000).tar()[:5000], "image_invalid"),
     (gzip.compress(corpus.Layer().add("a", data=corpus.noise(9000)).tar())[:4000], "image_invalid")],
)  # fmt: skip
async def test_a_bad_tar_is_told_and_leaves_nothing(catalog, library, tmp_path, content, code):
    path = tmp_path / "bad.tar"
    path.write_bytes(content)
    with pytest.raises(ImageError) as caught:
        await catalog.pull(f"tar:{path}")
    assert caught.value.code == code
    assert await nothing_stored(library, tmp_path / "home")


async def test_a_suite_that_does_not_exist(catalog, library, tmp_path):
    with pytest.raises(ImageError) as caught:
        await catalog.pull("debootstrap:no-such-suite")
    assert caught.value.code == "build_failed"
    assert await nothing_stored(library, tmp_path / "home")
