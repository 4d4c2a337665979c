import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ImageError, InfraError
from agentenv.layer import tree
from agentenv.layer.tree import HOLE, Chunks, Directory, Inode, Kind, Link, Whiteout, look_up, stack


def file(content=0, **more):
    return Inode(Kind.FILE, 0o644, 0, 0, size=5, sha256="x", content=content, **more)


def folder(mode=0o755, opaque=False, **children):
    inode = None if mode is None else Inode(Kind.DIRECTORY, mode, 0, 0)
    return Directory(inode, opaque, {k.encode(): v for k, v in children.items()})


def shape(node):
    if isinstance(node, Directory):
        mode = oct(node.inode.mode) if node.inode else None
        return mode, {k.decode(): shape(v) for k, v in node.children.items()}
    return node.kind.value, node.layer, node.content


def stacked(*layers):
    root = Directory()
    for number, layer in enumerate(layers):
        root = stack(root, layer, number)
    return root


def test_upper_files_replace_and_whiteouts_hide():
    root = stacked(folder(a=file(1), b=file(2)), folder(a=Whiteout(), b=file(9), c=Whiteout()))
    assert shape(root) == ("0o755", {"b": ("f", 1, 9)})


def test_folders_merge_and_listed_ones_give_their_mode():
    lower = folder(d=folder(0o700, x=file(1)), e=folder(0o711, y=file(2)))
    upper = folder(d=folder(0o750, z=file(3)), e=folder(None, w=file(4)))
    merged = shape(stacked(lower, upper))[1]
    assert merged["d"] == ("0o750", {"x": ("f", 0, 1), "z": ("f", 1, 3)})
    assert merged["e"] == ("0o711", {"y": ("f", 0, 2), "w": ("f", 1, 4)})


def test_opaque_folders_hide_what_is_below():
    merged = stacked(folder(d=folder(x=file(1))), folder(d=folder(opaque=True, y=file(2))))
    assert shape(merged)[1]["d"] == ("0o755", {"y": ("f", 1, 2)})


def test_a_file_over_a_folder_and_back():
    merged = stacked(folder(a=folder(x=file(1)), b=file(2)), folder(a=file(3), b=folder(y=file(4))))
    assert shape(merged)[1] == {"a": ("f", 1, 3), "b": ("0o755", {"y": ("f", 1, 4)})}


def test_a_link_to_a_lower_file_copies_it_up_for_both_names():
    one = file(1)
    merged = stacked(folder(a=one, b=one), folder(c=Link((b"a",)), d=Link((b"a",))))
    a, b, c, d = (merged.children[n] for n in (b"a", b"b", b"c", b"d"))
    assert a is c is d and a is not b  # as overlayfs: b keeps the lower inode
    assert a.layer == b.layer == 0  # the bytes stay where they are


def test_a_link_to_a_file_hidden_in_the_same_layer_still_finds_it():
    merged = stacked(folder(a=file(1)), folder(a=Whiteout(), b=Link((b"a",))))
    assert list(merged.children) == [b"b"]


@pytest.mark.parametrize("target", [(b"none",), (b"d",), (b"f", b"x")])
def test_a_broken_link_is_the_images_fault(target):
    with pytest.raises(ImageError) as caught:
        stacked(folder(d=folder(), f=file()), folder(c=Link(target)))
    assert caught.value.code == "image_link_broken"


def test_stacking_leaves_the_lower_tree_as_it_was():
    lower = stacked(folder(d=folder(x=file(1))))
    before = shape(lower)
    stack(lower, folder(d=folder(x=Whiteout(), y=file(2))), 1)
    assert shape(lower) == before


def test_what_is_stored_is_what_is_read():
    shared = file(3)
    root = folder(
        a=shared, b=shared, s=Inode(Kind.SYMLINK, 0o777, 1, 2, target=b"\xff/\n"),
        n=Inode(Kind.CHARACTER, 0o600, 0, 0, device=(300, 70000)), p=Inode(Kind.FIFO, 0o600, 0, 0),
        h=file(Chunks(16, (HOLE, 4, HOLE))), w=Whiteout(), l=Link((b"x", b"y")),
        d=folder(None, True, x=file(1, xattrs=((b"user.a", b"\0\xff"),), mtime=(5, 7))),
    )  # fmt: skip
    root.children[b"caf\xe9\n"] = file(8)
    data = tree.dump(root, 77)
    again, blocks = tree.load(data)
    assert blocks == 77
    assert tree.dump(again, 77) == data
    assert again.children[b"a"] is again.children[b"b"]
    assert again.children[b"d"].opaque and again.children[b"d"].inode is None
    assert look_up(again, (b"d", b"x")).xattrs == ((b"user.a", b"\0\xff"),)
    assert again.children[b"h"].content == Chunks(16, (HOLE, 4, HOLE))
    assert again.children[b"s"].target == b"\xff/\n"


@given(st.binary(max_size=200))
def test_damage_is_told_whatever_it_is(data):
    with pytest.raises(InfraError) as caught:
        tree.load(data)
    assert caught.value.code == "layer_damaged"


@given(st.data())
def test_a_cut_tree_is_told(data):
    whole = tree.dump(folder(a=file(1), b=folder(c=file(2))), 3)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(InfraError):
        tree.load(whole[:cut])


names = st.sampled_from([b"a", b"b", b"c", b"d"])
nodes = st.deferred(lambda: leaves | folders)
leaves = st.builds(Whiteout) | st.builds(file, st.integers(0, 99))
folders = st.builds(
    lambda listed, opaque, children: Directory(
        Inode(Kind.DIRECTORY, 0o755, 0, 0) if listed else None, opaque, children
    ),
    st.booleans(), st.booleans(), st.dictionaries(names, nodes, max_size=4),
)  # fmt: skip


def paths(root):
    return {path for path, _ in tree.walk(root)}


@given(folders, folders)
def test_no_whiteout_survives_and_upper_files_are_all_there(lower, upper):
    merged = stacked(lower, upper)
    kinds = {type(node) for _, node in tree.walk(merged)}
    assert kinds <= {Directory, Inode}
    wanted = {path for path, node in tree.walk(upper) if not isinstance(node, Whiteout)}
    assert wanted <= paths(merged)
    assert paths(merged) <= paths(lower) | paths(upper)
