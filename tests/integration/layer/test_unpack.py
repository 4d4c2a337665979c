"""The corpus of traps, as Linux mounts it, against GNU tar with overlayfs and against umoci."""

import subprocess

import pytest
from tests import corpus
from tests.library import flat

from agentenv.host.mount import mounted


@pytest.fixture
def layers(tmp_path):
    return [
        corpus.base_layer(),
        corpus.change_layer(),
        corpus.empty_layer(),
        corpus.link_layer(),
        corpus.sparse_layer(tmp_path),
    ]


async def pulled(library, layout, tmp_path):
    """The flat image of a layout, as one file."""
    image = await library.catalog.pull(f"oci:{layout}")
    return await flat(library, image, tmp_path / "flat")


def differences(wanted, found):
    names = sorted(set(wanted) | set(found))
    return {n: (wanted.get(n), found.get(n)) for n in names if wanted.get(n) != found.get(n)}


async def test_the_whole_corpus_is_what_overlayfs_makes_of_it(layers, library, tmp_path):
    layout = tmp_path / "layout"
    corpus.write(layout, layers)
    disk = await pulled(library, layout, tmp_path)
    with corpus.reference(tmp_path / "reference", layers) as root:
        wanted = corpus.facts(root)
    async with mounted(disk, "erofs", ("ro", "loop")) as root:
        found = corpus.facts(root)
    different = differences(wanted, found)
    # overlayfs counts the links of a lower inode, of which some may be hidden by now.
    for name, (one, other) in list(different.items()):
        if one and other and {**one, "links": 0} == {**other, "links": 0}:
            assert other["links"] == len(other["group"])
            del different[name]
    assert not different
    assert len(found) > 350


async def test_umoci_agrees_where_it_has_the_same_rules(library, tmp_path):
    layers = [corpus.base_layer(), corpus.empty_layer(), corpus.sparse_layer(tmp_path, 1 << 20)]
    layout = tmp_path / "layout"
    corpus.write(layout, layers)
    disk = await pulled(library, layout, tmp_path)
    argv = ["umoci", "unpack", "--image", f"{layout}:latest", tmp_path / "bundle"]
    subprocess.run(argv, check=True, capture_output=True)
    wanted = corpus.facts(tmp_path / "bundle" / "rootfs")
    async with mounted(disk, "erofs", ("ro", "loop")) as root:
        found = corpus.facts(root)
    for tree in (wanted, found):
        for fact in tree.values():
            fact["xattrs"].pop("user.empty", None)  # it drops empty ones
            if "target" in fact or fact["mode"].startswith("0o4"):
                fact.pop("mtime")  # of links and of folders whose times it leaves as they come
    assert not differences(wanted, found)


async def test_the_tools_checker_finds_nothing_wrong(layers, library, tmp_path, tools):
    layout = tmp_path / "layout"
    corpus.write(layout, layers)
    disk = await pulled(library, layout, tmp_path)
    fsck = tools.find("fsck.erofs")
    done = subprocess.run([fsck, disk], capture_output=True)
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
