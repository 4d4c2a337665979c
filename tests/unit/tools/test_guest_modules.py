import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.setup import guest_modules as gm
from tools.setup.guest_modules import Kernel

DEP = """\
kernel/drivers/net/virtio_net.ko.xz: kernel/drivers/net/net_failover.ko.xz kernel/net/core/failover.ko.xz
kernel/drivers/net/net_failover.ko.xz: kernel/net/core/failover.ko.xz
kernel/net/core/failover.ko.xz:
kernel/drivers/char/hw_random/virtio-rng.ko.xz:
kernel/lib/libcrc32c.ko.xz:
kernel/crypto/crc32c_generic.ko.xz:
kernel/fs/erofs/erofs.ko.xz: kernel/lib/libcrc32c.ko.xz
"""
KERNEL = Kernel(gm.parse_dep(DEP), frozenset({"ext4"}))


def names(paths):
    return [gm.normal(path) for path in paths]


@pytest.mark.parametrize(
    "path", ["virtio-rng", "kernel/x/virtio-rng.ko.xz", "a/virtio_rng.ko.zst", "virtio_rng.ko"]
)
def test_a_module_has_one_name(path):
    assert gm.normal(path) == "virtio_rng"


def test_dependencies_come_first():
    chosen, missing = gm.order(["virtio_net"], KERNEL)
    assert names(chosen) == ["failover", "net_failover", "virtio_net"]
    assert missing == []


def test_built_in_ones_are_neither_inserted_nor_missing():
    assert gm.order(["ext4"], KERNEL) == ([], [])


def test_what_the_kernel_does_not_have_is_said():
    assert gm.order(["overlay", "erofs"], KERNEL)[1] == ["overlay"]


def test_nothing_is_inserted_twice():
    chosen, _ = gm.order(["net_failover", "virtio_net", "virtio_net"], KERNEL)
    assert len(chosen) == len(set(chosen)) == 3


def test_soft_predecessors_are_found_by_alias_below_a_dependency():
    kernel = Kernel(
        KERNEL.dep,
        soft=gm.soft_dependencies("# comment\nsoftdep libcrc32c pre: crc32c\nsoftdep x post: y\n"),
        aliases=gm.parse_aliases("alias crc32c crc32c_generic\nalias pci:v*d* other\n"),
    )
    assert names(gm.order(["erofs"], kernel)[0]) == ["crc32c_generic", "libcrc32c", "erofs"]


def test_a_soft_predecessor_that_is_built_in_wins_over_a_module_of_the_same_alias():
    aliases = gm.parse_aliases(
        "alias crc32c crc32c_intel\n", "crc32c_generic.alias=crc32c\0ext4.license=GPL\0"
    )
    assert aliases["crc32c"] == "crc32c_generic"


def test_soft_circles_end():
    dep = gm.parse_dep("a.ko:\nb.ko:\n")
    kernel = Kernel(dep, soft={"a": ["b"], "b": ["a"]})
    assert sorted(gm.order(["a", "b"], kernel)[0]) == ["a.ko", "b.ko"]


def test_soft_dependencies_before_and_after():
    text = "softdep a pre: b c post: d\nsoftdep a pre: e\nsoftdep f g\n"
    assert gm.soft_dependencies(text) == {"a": ["b", "c", "e"]}


@given(st.data())
def test_any_acyclic_graph_is_inserted_in_a_valid_order(data):
    count = data.draw(st.integers(1, 12))
    needs = {
        n: data.draw(st.lists(st.integers(0, n - 1), unique=True)) if n else []
        for n in range(count)
    }
    # depmod writes the whole closure, in an order of its own.
    closure = {n: set[int]() for n in needs}
    for n, direct in needs.items():
        closure[n] = set(direct).union(*(closure[d] for d in direct)) if direct else set()
    listed = {n: data.draw(st.permutations(sorted(closure[n]))) for n in needs}
    dep = "\n".join(f"m{n}.ko: {' '.join(f'm{d}.ko' for d in ds)}" for n, ds in listed.items())
    wanted = data.draw(st.permutations([f"m{n}" for n in needs]))
    chosen, missing = gm.order(wanted, Kernel(gm.parse_dep(dep)))
    assert missing == []
    assert sorted(chosen) == sorted(f"m{n}.ko" for n in needs)
    for n, direct in needs.items():
        assert all(chosen.index(f"m{d}.ko") < chosen.index(f"m{n}.ko") for d in direct)


def test_a_kernel_folder_without_a_needed_module_is_refused(tmp_path, capsys):
    (tmp_path / "modules.dep").write_text(DEP)
    assert gm.main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "overlay" in said and "erofs" not in said


def test_a_kernel_folder_with_all_of_them(tmp_path, capsys):
    (tmp_path / "modules.dep").write_text(DEP)
    inside = [name for name in gm.BOOT if name not in ("virtio_net", "virtio_rng", "erofs")]
    (tmp_path / "modules.builtin").write_text("".join(f"kernel/{n}.ko\n" for n in inside))
    assert gm.main([str(tmp_path)]) == 0
    assert names(capsys.readouterr().out.split()) == [
        "failover", "net_failover", "virtio_net", "virtio_rng", "libcrc32c", "erofs",
    ]  # fmt: skip
