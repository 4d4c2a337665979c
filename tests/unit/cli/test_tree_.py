"""What a tree is made of: lines that end in sandboxes."""

from agentenv.cli.tree_ import grown, is_below, size


def relative(kind, name, state=None):
    return {"kind": kind, "id": name, "state": state}


def lineage(name, *ancestors):
    own = {"memory_bytes": 1 << 20, "disk_bytes": 0}
    return {"id": name, "state": "running", "ancestors": list(ancestors), "own": own}


BASE, GONE = relative("template", "base"), relative("sandbox", "gone")
A = relative("sandbox", "a", "running")
FOUND = [
    lineage("b", A, BASE),
    lineage("a", BASE),
    lineage("c", relative("snapshot", "green:one"), A, BASE),
    lineage("d", GONE),
]


def test_lines_that_begin_alike_share_their_beginning():
    root = grown(FOUND)
    base, gone = root.below.values()
    assert (base.label, gone.label) == ("base (template)", "gone forgotten")
    (a,) = base.below.values()
    assert a.label == "a running, own: 1.0 MiB memory, 0.0 MiB disk"
    assert [each.label.split()[0] for each in a.below.values()] == ["b", "green:one"]
    assert [each.label.split()[0] for each in gone.below.values()] == ["d"]


def test_a_line_of_one_is_what_came_from_it():
    assert [one["id"] for one in FOUND if is_below(one, "a")] == ["b", "c"]


def test_sizes_are_told_in_mebibytes():
    assert (size(0), size(1536 << 10)) == ("0.0 MiB", "1.5 MiB")
