import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.corpus import Layer

from agentenv.errors import ImageError
from agentenv.layer.erofs import BLOCK
from agentenv.layer.tree import HOLE, Chunks, Directory, Inode, Kind, Link, Whiteout, look_up
from agentenv.layer.unpack import Unpacker, split_path


def unpacked(layer):
    data = io.BytesIO()
    unpacker = Unpacker(data)
    diff_id = unpacker.run(io.BytesIO(layer.blob()), lambda: None)
    assert len(data.getvalue()) == unpacker.blocks * BLOCK
    return unpacker, data.getvalue(), diff_id


def tree(layer):
    return unpacked(layer)[0].root


def test_equal_contents_lie_once():
    unpacker, _, _ = unpacked(Layer().add("a", data=b"x" * 5000).add("b", data=b"x" * 5000))
    assert unpacker.blocks == 2
    assert unpacker.root.children[b"a"].content == unpacker.root.children[b"b"].content == 0


def test_zeros_take_no_space():
    unpacker, data, _ = unpacked(Layer().add("z", data=b"a" + bytes(3 << 20) + b"b"))
    content = unpacker.root.children[b"z"].content
    assert isinstance(content, Chunks) and content.at.count(HOLE) > 40
    assert unpacker.blocks == 17 and data[0:1] == b"a"  # a chunk of 64 KiB and the last block


def test_whiteouts_hide_lower_entries_only():
    root = tree(Layer().add("d/.wh.x").add(".wh.y").add("y", data=b"new").add("z").add(".wh.z"))
    assert root.children[b"d"].children == {b"x": Whiteout()}
    assert isinstance(root.children[b"y"], Inode) and isinstance(root.children[b"z"], Inode)


@pytest.mark.parametrize("first", [True, False])
def test_a_whiteout_beside_a_folder_of_its_name_makes_it_opaque(first):
    layer = Layer()
    for step in ("w", "f") if first else ("f", "w"):
        _ = layer.add(".wh.d") if step == "w" else layer.folder("d").add("d/x")
    found = tree(layer).children[b"d"]
    assert found.opaque and list(found.children) == [b"x"]


def test_aufs_book_keeping_is_dropped():
    root = tree(Layer().folder(".wh..wh.plnk").add(".wh..wh.aufs").add("d/.wh..wh..opq"))
    assert list(root.children) == [b"d"] and root.children[b"d"].opaque


def test_a_parent_that_is_not_listed_has_no_inode():
    root = tree(Layer().add("a/b/c"))
    assert root.inode is None and root.children[b"a"].inode is None


def test_symlinks_of_the_layer_are_followed_inside_the_root():
    layer = Layer().folder("real").symlink("s", "../../real/.").symlink("t", "/s").add("t/x/y")
    assert look_up(tree(layer), (b"real", b"x", b"y")) is not None


def test_symlinks_in_circles_are_refused():
    with pytest.raises(ImageError) as caught:
        tree(Layer().symlink("a", "b").symlink("b", "a").add("a/x"))
    assert caught.value.code == "image_bad_path"


def test_links_within_share_the_inode_and_others_wait():
    root = tree(Layer().add("a").hardlink("b", "./a").hardlink("c", "/elsewhere/x"))
    assert root.children[b"a"] is root.children[b"b"]
    assert root.children[b"c"] == Link((b"elsewhere", b"x"))


def test_later_entries_replace_and_folders_keep_their_children():
    layer = (
        Layer().add("a", data=b"1").add("a", data=b"22").folder("d").add("d/x").folder("d", 0o700)
    )
    root = tree(layer.folder("e").add("e/x").add("e"))
    assert root.children[b"a"].size == 2
    assert list(root.children[b"d"].children) == [b"x"] and root.children[b"d"].inode.mode == 0o700
    assert isinstance(root.children[b"e"], Inode)


def test_overlay_attributes_of_a_hostile_layer_are_dropped():
    xattrs = {"trusted.overlay.opaque": b"y", "user.overlay.whiteout": b"y", "user.kept": b"1",
              "system.nfs4_acl": b"x"}  # fmt: skip
    root = tree(Layer().folder("d", xattrs=xattrs))
    assert root.children[b"d"].inode.xattrs == ((b"user.kept", b"1"),)


@pytest.mark.parametrize(
    ("layer", "code"),
    [
        (Layer().add("../x"), "image_path_escape"),
        (Layer().add("a/../../x"), "image_path_escape"),
        (Layer().add("/../../etc/passwd"), "image_path_escape"),
        (Layer().hardlink("x", "../../etc/passwd"), "image_path_escape"),
        (Layer().folder("d").hardlink("x", "d"), "image_bad_path"),
        (Layer().hardlink("x", "/"), "image_bad_path"),
        (Layer().add(".wh."), "image_bad_path"),
        (Layer().add(".wh..."), "image_bad_path"),
        (Layer().symlink("s", ""), "image_bad_path"),
        (Layer().symlink("s", "x" * 4096), "image_bad_path"),
        (Layer().add("n" * 256), "image_bad_path"),
        (Layer().add("x", owner=(1 << 33, 0)), "image_bad_owner"),
        (Layer(raw=b"no tar at all" * 100), "layer_invalid"),
        (Layer(raw=b""), "image_invalid"),
    ],
)
def test_hostile_and_broken_layers_are_the_images_fault(layer, code):
    with pytest.raises(ImageError) as caught:
        tree(layer)
    assert caught.value.code == code


def test_damage_in_the_middle_is_not_taken_for_the_end():
    raw = bytearray(Layer().add("a", data=b"1" * 600).add("b").tar())
    raw[512 * 3 : 512 * 4] = b"\xff" * 512
    with pytest.raises(ImageError) as caught:
        tree(Layer(raw=bytes(raw)))
    assert caught.value.code == "layer_invalid" and "1536" in caught.value.message


@pytest.mark.parametrize("keep", [600, 1024, 1600])
def test_a_cut_tar_is_told(keep):
    raw = Layer().add("a", data=b"1" * 3000).add("b").tar()
    with pytest.raises(ImageError):
        tree(Layer("plain", raw=raw[:keep]))


def test_paths_are_normalised():
    assert split_path("/a/./b//../c", "entry") == [b"a", b"c"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=3000))
def test_any_bytes_unpack_or_are_told(data):
    header = tarfile.TarInfo("f").tobuf()
    for blob in (data, header + data, header[:100] + data):
        try:
            Unpacker(io.BytesIO()).run(io.BytesIO(blob), lambda: None)
        except ImageError:
            continue


def test_times_keep_their_nanoseconds():
    root = tree(Layer().add("t", headers={"mtime": "12.000000345"}).add("b", mtime=-5))
    assert root.children[b"t"].mtime == (12, 345) and root.children[b"b"].mtime == (0, 0)


def test_modes_owners_and_devices():
    root = tree(Layer().add("c", tarfile.CHRTYPE, device=(300, 70_000), mode=0o4755, owner=(5, 6)))
    inode = root.children[b"c"]
    assert (inode.kind, inode.mode, inode.uid, inode.gid) == (Kind.CHARACTER, 0o4755, 5, 6)
    assert inode.device == (300, 70_000)
    assert isinstance(root, Directory)


def test_a_claim_of_terabytes_costs_nothing():
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s",
               "GNU.sparse.realsize": str(1 << 42)}  # fmt: skip
    layer = Layer().add("s", data=b"1\n0\n1\n".ljust(512, b"\0") + b"x", headers=headers)
    unpacker, data, _ = unpacked(layer)
    inode = unpacker.root.children[b"s"]
    assert inode.size == 1 << 42 and data[:1] == b"x" and unpacker.blocks == 16384


def test_reading_holes_can_be_interrupted():
    class Stopped(Exception):
        pass

    calls = []

    def check():
        calls.append(1)
        if len(calls) > 20:
            raise Stopped

    layer = Layer().add("zeros", data=bytes(8 << 20))
    with pytest.raises(Stopped):
        Unpacker(io.BytesIO()).run(io.BytesIO(layer.blob()), check)


@pytest.mark.parametrize("path", ["/".join(["d"] * 600), "a\0b", "x/" * 2500])
def test_paths_that_no_guest_could_use_are_refused(path):
    with pytest.raises(ImageError) as caught:
        tree(Layer(raw=Layer(format=tarfile.PAX_FORMAT).add("x/y", headers={"path": path}).tar()))
    assert caught.value.code == "image_bad_path"
