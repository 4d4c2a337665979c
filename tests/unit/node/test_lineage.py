"""Who descends from whom, and who holds what alone."""

from datetime import UTC, datetime

from agentenv.model import Guest, Resources
from agentenv.node.lineage import SOURCE, Family, Kind, Relative
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import State
from agentenv.snapshot.manifest import Element, Manifest
from agentenv.store.records import BuildRow, TemplateRow

NOW = datetime(2026, 12, 2, tzinfo=UTC)
BASE, BASE_MEMORY = Element(8, "0" * 64), Element(4, "1" * 64)


def sandbox(name, template="tpl", build="built", *, origin=None, state=State.RUNNING, alias=None):
    return SandboxInfo(
        name,
        state,
        template,
        build,
        "img",
        NOW,
        NOW,
        Resources(1),
        Guest(),
        origin=origin,
        alias=alias,
    )


def manifest(name, sandbox_id, memory, disk):
    return Manifest(
        name, NOW, sandbox_id, None, "img", Resources(1), Guest(), {},
        (BASE, *(Element(8, raw=each) for each in disk)),
        (BASE_MEMORY, *(Element(4, raw=each) for each in memory)),
    )  # fmt: skip


TEMPLATES = [
    TemplateRow("tpl", ("base",), {"default": "built"}, NOW),
    TemplateRow("green", ("green",), {"one": "saved"}, NOW),
]
BUILDS = [
    BuildRow("built", "tpl", "img", NOW, {}, "birth"),
    BuildRow("saved", "green", "img", NOW, {SOURCE: "a"}, "snap"),
]
SANDBOXES = [
    sandbox("a", alias="base", origin="tpl"),
    sandbox("fork", origin="a", state=State.PAUSED),
    sandbox("made", "green", "saved", origin="green", state=State.RESUMING),
    sandbox("grandchild", origin="fork"),
    sandbox("ended", origin="fork", state=State.ENDED),
    sandbox("orphan", origin="forgotten"),
    sandbox("booted", "img", ""),
    sandbox("raw", "anonymous", "", origin="anonymous"),
]
MANIFESTS = [
    manifest("birth", "builder", [], []),
    manifest("snap", "a", ["m1"], ["d1"]),
    manifest("fork-point", "a", ["m2"], ["d1", "d2"]),
    manifest("anonymous", "a", ["m1"], []),
    manifest("paused", "fork", ["m2", "m3"], ["d1", "d2", "d3"]),
    manifest("elsewhere", "orphan", ["m1"], []),
]


def family():
    return Family(SANDBOXES, TEMPLATES, BUILDS, MANIFESTS)


def line(name):
    return [(str(each.kind), each.id) for each in family().ancestors(name)]


def test_lines_lead_to_what_they_began_with():
    root = ("template", "base")
    assert line("a") == [root]
    assert line("fork") == [("sandbox", "a"), root]
    assert line("grandchild") == [("sandbox", "fork"), ("sandbox", "a"), root]
    assert line("made") == [("snapshot", "green:one"), ("sandbox", "a"), root]
    assert line("raw") == [("snapshot", "anonymous"), ("sandbox", "a"), root]
    assert line("booted") == [("image", "img")]
    assert line("unknown") == []


def test_one_that_is_recorded_no_more_ends_the_line():
    assert family().ancestors("orphan") == (Relative(Kind.SANDBOX, "forgotten", None),)


def test_a_snapshot_whose_record_is_gone_is_still_named():
    gone = Family(SANDBOXES, [], [], [])
    assert gone.ancestors("made") == (Relative(Kind.TEMPLATE, "green"),)
    assert gone.ancestors("raw") == (Relative(Kind.SNAPSHOT, "anonymous"),)


def test_children_are_forks_and_those_of_its_snapshots_with_their_states():
    found = {(each.id, each.state) for each in family().children("a")}
    assert found == {
        ("fork", State.PAUSED), ("made", State.PAUSED), ("raw", State.RUNNING),
    }  # fmt: skip
    assert {each.id for each in family().children("fork")} == {"grandchild", "ended"}
    assert family().children("grandchild") == ()


def test_what_others_hold_as_well_is_nobodys_own_but_a_descendants_counts():
    memory, disk = family().own("a")
    assert {each.raw for each in memory} == {"m2"}  # m1 is another's as well
    assert {each.raw for each in disk} == {"d1", "d2"}
    memory, disk = family().own("fork")
    assert {each.raw for each in memory} == {"m3"} and {each.raw for each in disk} == {"d3"}
    assert family().own("booted") == (set(), set())
