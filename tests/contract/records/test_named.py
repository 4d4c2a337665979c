from datetime import UTC, datetime

import pytest

from agentenv.errors import UserError
from agentenv.store.records import ImageRow
from agentenv.store.sql import SqlRecords
from agentenv.template.named import find_build, name_image


@pytest.fixture
async def records(tmp_path):
    store = await SqlRecords.open_sqlite(tmp_path / "state.db")
    for name in ("one", "two"):
        await store.put_image(ImageRow(name, name, "d", datetime.now(UTC), {}))
    yield store
    await store.close()


async def test_a_name_moves_to_the_newest_image_and_tags_stay(records):
    first = await name_image(records, "one", "base")
    tagged = await name_image(records, "one", "base:v1")
    second = await name_image(records, "two", "Base")
    template, build = await find_build(records, "base")
    assert build == second and template.tags == {"default": second.id, "v1": tagged.id}
    assert (await find_build(records, "base:v1"))[1] == tagged
    assert (await find_build(records, template.id))[1] == second
    assert first.template_id == template.id and template.names == ("base",)


async def test_unknown_names_and_tags_are_none(records):
    await name_image(records, "one", "base")
    assert await find_build(records, "other") is None
    assert await find_build(records, "base:none") is None
    with pytest.raises(UserError):
        await name_image(records, "one", "no name")
