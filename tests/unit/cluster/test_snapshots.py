"""Which templates are snapshots, and how they are found."""

from datetime import UTC, datetime, timedelta

import pytest

from agentenv.cluster.snapshots import SOURCE, find
from agentenv.store.records import BuildRow, ImageRow, TemplateRow
from agentenv.store.sql import SqlRecords

NOW = datetime(2026, 12, 2, tzinfo=UTC)


@pytest.fixture
async def records(tmp_path):
    store = await SqlRecords.open_sqlite(tmp_path / "state.db")
    await store.put_image(ImageRow("img", "ref", "sha256:0", NOW, {}))
    rows = {
        "one": ("one", ("team/saved",), {"a": "1", "b": "2"}),
        "two": ("two", (), {"default": "3"}),
        "built": ("built", ("web",), {"default": "4"}),
    }
    for template, names, tags in rows.values():
        await store.put_template(TemplateRow(template, names, {}, NOW))
        for build in tags.values():
            doc = {} if template == "built" else {SOURCE: f"sandbox{build}"}
            made = NOW + timedelta(minutes=int(build))
            await store.put_build(BuildRow(build, template, "img", made, doc))
        await store.put_template(TemplateRow(template, names, tags, NOW))
    yield store
    await store.close()


@pytest.mark.parametrize(
    ("sandbox", "name", "wanted"),
    [
        (None, None, ["two:default", "team/saved:b", "team/saved:a"]),
        ("sandbox1", None, ["team/saved:a"]),
        (None, "team/saved", ["team/saved:b", "team/saved:a"]),
        (None, "TEAM/saved:A", ["team/saved:a"]),
        (None, "two:default", ["two:default"]),
        (None, "web", []),
        (None, "nobody", []),
        ("sandbox3", "team/saved", []),
    ],
)
async def test_they_are_found_newest_first(records, sandbox, name, wanted):
    assert [info.id for info in await find(records, sandbox, name)] == wanted
