"""What builds keep, on each store of records."""

from datetime import UTC, datetime

import pytest

from agentenv.store.records import BuildRow, ImageRow, SnapshotRow, TemplateRow
from agentenv.store.sql import SqlRecords

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
async def records(tmp_path):
    store = await SqlRecords.open_sqlite(tmp_path / "state.db")
    await store.put_image(ImageRow("img", "ref", "d", NOW, {}))
    for name in ("one", "two", "three"):
        await store.put_snapshot(SnapshotRow(name, None, "sbx", "img", NOW, {}))
    yield store
    await store.close()


async def test_steps_are_found_by_key_until_they_are_dropped(records):
    steps = records.steps
    assert await steps.find("a") is None
    await steps.keep("a", "one")
    await steps.keep("b", "one")
    await steps.keep("c", "two")
    await steps.keep("a", "two")
    assert [await steps.find(key) for key in "abc"] == ["two", "one", "two"]
    await steps.drop("two")
    await steps.drop("nothing")
    assert [await steps.find(key) for key in "abc"] == [None, "one", None]


async def test_those_used_last_stay(records):
    steps = records.steps
    for key, name in (("a", "one"), ("b", "two"), ("c", "three")):
        await steps.keep(key, name)
    await steps.find("a")
    assert await steps.trim(2) == 1
    assert [await steps.find(key) for key in "abc"] == ["one", None, "three"]
    assert await steps.trim(2) == 0


async def test_a_kept_snapshot_is_needed(records):
    await records.steps.keep("a", "one")
    assert await records.needed_snapshots() == {"one"}
    assert not await records.drop_snapshot("one")
    await records.steps.drop("one")
    assert await records.drop_snapshot("one")


async def test_a_build_and_its_tags_come_at_one_moment(records):
    await records.put_template(TemplateRow("tpl", ("base",), {"default": "old", "v1": "old"}, NOW))
    row = BuildRow("new", "tpl", None, NOW, {"a": 1}, "one", "ready")
    await records.put_build(row, ("default", "v2"))
    tags = (await records.template("base")).tags
    assert tags == {"default": "new", "v1": "old", "v2": "new"}
    assert await records.build("new") == row


async def test_builds_are_listed_by_template_and_status(records):
    for name in ("t1", "t2"):
        await records.put_template(TemplateRow(name, (name,), {}, NOW))
    rows = [
        BuildRow("a", "t1", None, NOW, status="waiting"),
        BuildRow("b", "t1", None, NOW.replace(year=2027), status="error"),
        BuildRow("c", "t2", None, NOW, status="waiting"),
    ]
    for row in rows:
        await records.put_build(row)
    assert [row.id for row in await records.builds("t1")] == ["b", "a"]
    assert {row.id for row in await records.builds(status="waiting")} == {"a", "c"}
    await records.drop_build("a")
    assert [row.id for row in await records.builds("t1")] == ["b"]
