import io
import struct

import pytest

from agentenv.errors import ImageError
from agentenv.layer import erofs
from agentenv.layer.tree import HOLE, Chunks, Directory, Inode, Kind


def written(root, blocks=(8,)):
    out = io.BytesIO()
    count = erofs.write(root, list(blocks), bytes(range(16)), out)
    data = out.getvalue()
    assert len(data) == count * erofs.BLOCK
    return data


def file(content=0, size=10, **more):
    return Inode(Kind.FILE, 0o644, 0, 0, size=size, content=content, **more)


def test_the_superblock_says_what_is_there():
    data = written(Directory(children={b"a": file(), b"b": file(1)}), (8, 5))
    fields = erofs.SUPERBLOCK.unpack_from(data, erofs.SUPERBLOCK_AT)
    assert fields[0] == erofs.MAGIC
    assert (fields[3], fields[6]) == (12, 3)  # block size bits, inodes
    assert fields[9] == len(data) // erofs.BLOCK + 13  # blocks in all
    assert fields[12] == bytes(range(16))


def test_its_checksum_is_over_the_rest_of_the_block():
    data = bytearray(written(Directory()))
    start = erofs.SUPERBLOCK_AT
    stored = struct.unpack_from("<I", data, start + 4)[0]
    struct.pack_into("<I", data, start + 4, 0)
    assert erofs.crc32c(bytes(data[start : erofs.BLOCK])) == stored


def test_crc32c_of_the_standard_check_value():
    assert erofs.crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283


def test_equal_trees_give_equal_bytes():
    def tree():
        return Directory(children={b"z": file(), b"a": Directory(children={b"x": file(2)})})

    assert written(tree()) == written(tree())


def test_file_data_is_addressed_behind_the_metadata_in_the_layer_it_lies_in():
    data = written(Directory(children={b"f": file(3, layer=1)}), (8, 5))
    meta = len(data) // erofs.BLOCK
    inode = erofs.INODE.unpack_from(data, erofs.FIRST_INODE + 128)
    assert inode[5] == meta + 8 + 3


def test_holes_are_marked_in_the_block_map():
    chunks = Chunks(16, (2, HOLE, 18))
    data = written(Directory(children={b"f": file(chunks, size=150_000)}), (40,))
    at = erofs.FIRST_INODE + 128
    inode = erofs.INODE.unpack_from(data, at)
    meta = len(data) // erofs.BLOCK
    assert inode[0] == 1 | erofs.CHUNKED << 1 and inode[5] == 4  # 16 blocks a chunk
    assert struct.unpack_from("<3I", data, at + 64) == (meta + 2, 0xFFFFFFFF, meta + 18)


def test_no_inline_data_crosses_a_block():
    children = {b"%03d" % n: Inode(Kind.SYMLINK, 0o777, 0, 0, target=b"t" * (n * 13)) for n in
                range(1, 300)}  # fmt: skip
    written(Directory(children=children))
    placed = erofs._collect(Directory(children=children))
    for one in placed:
        erofs._measure(one)
    erofs._place_inodes(placed)
    for one in placed:
        if one.layout == erofs.INLINE:
            end = one.at + erofs.INODE_SIZE + one.length - 1
            assert one.at // erofs.BLOCK == end // erofs.BLOCK


@pytest.mark.parametrize(
    ("root", "code"),
    [
        (Directory(children={b"n" * 256: file()}), "image_bad_path"),
        (Directory(children={b"f": file(xattrs=((b"user.a", bytes(65_535)), (b"user.b", b"x" * 99)))}),
         "image_bad_xattr"),
    ],
)  # fmt: skip
def test_what_it_cannot_hold_is_the_images_fault(root, code):
    with pytest.raises(ImageError) as caught:
        written(root)
    assert caught.value.code == code


def test_an_image_over_its_address_range_is_refused():
    with pytest.raises(ImageError) as caught:
        written(Directory(), (0xFFFFFFFF,))
    assert caught.value.code == "image_too_large"
