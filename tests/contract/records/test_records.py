"""What every record store must do; run on each implementation."""

import asyncio
import sqlite3
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from agentenv.errors import Conflict, InfraError
from agentenv.store.records import BuildRow, ImageRow, SandboxRow, SnapshotRow, TemplateRow
from agentenv.store.sql import SqlRecords

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@pytest.fixture
async def records(tmp_path: Path):
    store = await SqlRecords.open_sqlite(tmp_path / "state.db")
    yield store
    await store.close()


def image(name: str = "img", **more) -> ImageRow:
    return replace(ImageRow(name, f"ref/{name}", "sha256:0", NOW, {"k": [1]}), **more)


def sandbox(name: str = "sbx", **more) -> SandboxRow:
    row = SandboxRow(
        name, "running", "tpl", "b", "img", None, None, 3, NOW, NOW, {"a": "ü"}, {"x": None}
    )
    return replace(row, **more)


async def test_images_come_back_whole_by_id_and_newest_by_reference(records):
    await records.put_image(image())
    newer = image("img2", reference="ref/img", created=NOW + timedelta(microseconds=1))
    await records.put_image(newer)
    assert await records.image("img") == image()
    assert await records.image("ref/img") == newer
    assert await records.image("nothing") is None
    assert [row.id for row in await records.images()] == ["img2", "img"]


async def test_an_image_in_use_is_not_dropped(records):
    await records.put_image(image())
    await records.put_template(TemplateRow("tpl", ("base",), {"default": "b"}, NOW))
    await records.put_build(BuildRow("b", "tpl", "img", NOW))
    await records.put_sandbox(sandbox())
    for hold in (records.drop_template("tpl"), records.put_sandbox(sandbox(state="ended"))):
        with pytest.raises(Conflict) as caught:
            await records.drop_image("img")
        assert caught.value.code == "image_in_use"
        await hold
    await records.drop_image("img")
    assert await records.image("img") is None


async def test_templates_have_unique_names_and_tags(records):
    row = TemplateRow("tpl", ("base", "alias"), {"default": "b1", "v1": "b2"}, NOW)
    await records.put_template(row)
    assert await records.template("alias") == await records.template("tpl") == row
    with pytest.raises(Conflict) as caught:
        await records.put_template(TemplateRow("other", ("alias",), {}, NOW))
    assert caught.value.code == "name_taken"
    assert await records.template("other") is None
    renamed = replace(row, names=("base",), tags={"default": "b3"})
    await records.put_template(renamed)
    assert await records.template("alias") is None and await records.templates() == [renamed]


async def test_builds_of_one_name_are_one_templates_though_it_goes_meanwhile(records):
    await records.put_image(image())

    async def add(number):
        build = BuildRow(f"b{number}", f"t{number}", "img", NOW)
        return await records.add_build(build, "base", ("default",))

    async def drop():
        if found := await records.template("base"):
            await records.drop_template(found.id)

    await asyncio.gather(*(work for number in range(8) for work in (add(number), drop())))
    last = await add(8)
    template = await records.template("base")
    assert template.id == last.template_id and template.tags == {"default": "b8"}
    assert await records.build("b8") == last
    nameless = await records.add_build(BuildRow("n", "tn", "img", NOW), None, ("default",))
    assert (await records.template("tn")).tags == {"default": nameless.id}


async def test_dropping_a_template_drops_its_builds(records):
    await records.put_image(image())
    await records.put_template(TemplateRow("tpl", ("base",), {"default": "b"}, NOW))
    build = BuildRow("b", "tpl", "img", NOW, {"n": 1})
    await records.put_build(build)
    assert await records.build("b") == build
    await records.drop_template("tpl")
    assert await records.build("b") is None and await records.template("base") is None


async def test_sandboxes_keep_microseconds_and_order(records):
    later = sandbox("sbx2", started_at=NOW + timedelta(microseconds=1), slot=None)
    await records.put_sandbox(sandbox())
    await records.put_sandbox(later)
    assert await records.sandboxes() == [later, sandbox()]
    await records.put_sandbox(sandbox(state="killing"))
    assert (await records.sandbox("sbx")).state == "killing"
    await records.drop_sandbox("sbx")
    await records.drop_sandbox("sbx")
    assert await records.sandbox("sbx") is None


async def test_many_writers_do_not_collide(records, tmp_path):
    other = await SqlRecords.open_sqlite(tmp_path / "state.db")
    await asyncio.gather(
        *(store.put_sandbox(sandbox(f"s{i}")) for i in range(20) for store in (records, other))
    )
    assert len(await records.sandboxes()) == 20
    await other.close()


async def test_a_foreign_format_is_refused(records, tmp_path):
    async with records._transaction() as db:
        await db.exec_driver_sql("UPDATE schema SET version = 99")
    with pytest.raises(InfraError) as caught:
        await SqlRecords.open_sqlite(tmp_path / "state.db")
    assert caught.value.code == "state_format"


async def test_what_was_acknowledged_survives_kill_9(tmp_path):
    script = (
        "import asyncio, os, sys; from pathlib import Path\n"
        "from agentenv.store.sql import SqlRecords\n"
        "sys.path.insert(0, sys.argv[2]); from test_records import sandbox\n"
        "async def main():\n"
        "    store = await SqlRecords.open_sqlite(Path(sys.argv[1]))\n"
        "    await store.put_sandbox(sandbox()); os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path / "state.db"), str(Path(__file__).parent)
    )
    assert await child.wait() == -9
    store = await SqlRecords.open_sqlite(tmp_path / "state.db")
    assert await store.sandbox("sbx") == sandbox()
    await store.close()


async def test_a_fresh_database_that_somebody_else_is_opening_is_waited_for(tmp_path):
    path = tmp_path / "fresh.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")  # what the switch to WAL, made by another process, holds
    opening = asyncio.ensure_future(SqlRecords.open_sqlite(path))
    done, _ = await asyncio.wait((opening,), timeout=0.5)
    assert not done
    other.execute("COMMIT")
    other.close()
    records = await opening
    assert await records.images() == []
    await records.close()


def snapshot(name: str = "snap", **more) -> SnapshotRow:
    return replace(SnapshotRow(name, None, "sbx", "img", NOW, {"state": "ü"}), **more)


async def test_snapshots_come_back_whole_oldest_first(records):
    await records.put_image(image())
    newer = snapshot("later", parent="snap", created=NOW + timedelta(microseconds=1))
    await records.put_snapshot(newer)
    await records.put_snapshot(snapshot())
    assert await records.snapshots() == [snapshot(), newer]
    assert await records.snapshot("later") == newer and await records.snapshot("other") is None
    changed = snapshot(doc={"n": 1})
    await records.put_snapshot(changed)
    assert await records.snapshot("snap") == changed


async def test_a_snapshot_and_its_sandbox_are_put_together_or_not_at_all(records):
    await records.put_image(image())
    paused = sandbox(state="paused", snapshot_id="snap", disk_id="snap", slot=None)
    await records.put_snapshot(snapshot(), paused)
    assert await records.sandboxes() == [paused]
    with pytest.raises(IntegrityError):  # a sandbox without a state
        await records.put_snapshot(snapshot("bad"), sandbox("other", state=None))
    assert await records.snapshot("bad") is None
    assert await records.sandboxes() == [paused]


async def test_a_snapshot_is_needed_by_builds_and_living_sandboxes(records):
    await records.put_image(image())
    for name in ("built", "memory", "disk", "useless"):
        await records.put_snapshot(snapshot(name))
    await records.put_template(TemplateRow("tpl", ("base",), {"default": "b"}, NOW))
    await records.put_build(BuildRow("b", "tpl", None, NOW, snapshot_id="built"))
    lives = sandbox(snapshot_id="memory", disk_id="disk")
    await records.put_sandbox(lives)
    assert await records.needed_snapshots() == {"built", "memory", "disk"}
    for name in ("built", "memory", "disk"):
        assert not await records.drop_snapshot(name)
        assert await records.snapshot(name)
    assert await records.drop_snapshot("useless")
    await records.put_sandbox(replace(lives, state="ended"))
    await records.drop_template("tpl")
    assert await records.needed_snapshots() == set()
    for name in ("built", "memory", "disk"):
        assert await records.drop_snapshot(name)
    assert await records.snapshots() == []


async def test_the_image_of_a_snapshot_is_not_dropped(records):
    await records.put_image(image())
    await records.put_snapshot(snapshot())
    with pytest.raises(Conflict) as caught:
        await records.drop_image("img")
    assert caught.value.code == "image_in_use"
    assert await records.drop_snapshot("snap")
    await records.drop_image("img")
