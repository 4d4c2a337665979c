"""Files of memories and disks: laid over one another, damaged, swept."""

import asyncio

import pytest
from tests.blocks import BLOCK
from tests.integration.snapshot.conftest import PAGES, Home, flat, pages

from agentenv import _core
from agentenv.errors import InfraError
from agentenv.snapshot.raws import Raws

OLD = pages(1, 0, 1, 2, 9)
NEW = {**pages(2, 1, 30), 2: None}


async def test_the_newest_content_of_a_page_wins(home: Home):
    raws = home.snapshots.raws
    names = [home.raw(content).raw or "" for content in (OLD, NEW)]
    sources = [(raws.memory(raw), raws.read_runs(raw)) for raw in names]
    merged = raws.merge(sources, "merged", PAGES * BLOCK)
    assert raws.memory("merged").read_bytes() == flat(OLD, NEW)
    assert raws.read_runs("merged") == merged
    covered = {
        page for first, count, _ in _core.run_spans(merged) for page in range(first, first + count)
    }
    assert covered == OLD.keys() | NEW.keys()  # zeroes too: they hide what lies below


async def test_damaged_and_missing_runs_are_told(home: Home):
    raws = home.snapshots.raws
    raw = home.raw(OLD).raw or ""
    raws.runs(raw).write_bytes(b"half a run")
    with pytest.raises(InfraError) as caught:
        raws.read_runs(raw)
    assert caught.value.code == "snapshot_damaged"
    raws.runs(raw).unlink()
    with pytest.raises(InfraError):
        raws.read_runs(raw)


async def test_a_sweep_spares_what_is_needed_used_or_in_the_making(tmp_path):
    raws = Raws(tmp_path / "raws")
    raws.prepare()
    for name in ("needed", "used", "kept", "stray"):
        raws.make_memory(name, BLOCK)
        raws.put_runs(name, b"")
    raws.use("used", "machine")
    left = lambda: {path.stem for path in (tmp_path / "raws").iterdir()}  # noqa: E731
    with raws.kept(["kept"]), raws.kept(["kept"]):
        await raws.sweep(lambda: {"needed"})
        assert left() == {"needed", "used", "kept"}
    raws.release("machine")
    await raws.sweep(lambda: {"needed"})
    assert left() == {"needed"}


async def test_what_is_recorded_while_files_are_listed_stays(tmp_path):
    raws = Raws(tmp_path / "raws")
    raws.prepare()
    needed = set[str]()

    def recorded():
        raws.make_memory("later", BLOCK)
        return needed

    with raws.making(1) as (made,):
        raws.make_memory(made, BLOCK)
        sweeping = asyncio.ensure_future(raws.sweep(recorded))
        await asyncio.sleep(0)
        needed.add(made)
    await sweeping
    assert raws.memory(made).exists() and raws.memory("later").exists()


async def test_a_memory_that_was_stored_meanwhile_stays_until_its_machine_runs(tmp_path):
    raws = Raws(tmp_path / "raws")
    raws.prepare()
    raws.make_memory("memory", BLOCK)
    raws.use("memory", "machine")
    raws.is_pinned("memory", "machine")
    await raws.sweep(set)
    assert raws.memory("memory").exists()  # it is about to be opened by its name
    raws.has_open("machine")
    await raws.sweep(set)
    assert not raws.memory("memory").exists()
