"""The snapshots of a home: found, opened, forgotten."""

import pytest
from tests.integration.snapshot.conftest import Home, flat, home_in, pages, until_async

from agentenv.errors import NotFound
from agentenv.snapshot.manifest import to_row

ONE, TWO = pages(1, 0, 1, 2, 9), pages(2, 1, 30)


async def test_another_home_finds_one_in_the_store(home: Home, folder):
    made = await home.stored(await home.add((home.raw(ONE), home.raw(TWO))))
    await until_async(lambda: home.snapshots._storing.is_stored(made.id))
    async with home_in(folder, "second") as second:
        async with second.snapshots.held(made.id) as found:
            assert found == home.now(made)
            assert await second.content(found.memory or ()) == flat(ONE, TWO)
        with pytest.raises(NotFound) as caught:
            await second.snapshots.find("nothing")
        assert caught.value.code == "snapshot_not_found"


async def test_one_whose_layer_is_gone_is_not_found(home: Home, folder):
    made = await home.stored(await home.add((home.raw(ONE),)))
    layer = (made.memory or ())[0].layer or ""
    await home.library.layers.objects.delete([f"layer/{layer}"])
    async with home_in(folder, "second") as second:
        with pytest.raises(NotFound, match="not complete"):
            await second.snapshots.find(made.id)


async def test_what_a_machine_opens_lies_where_the_map_says(home: Home):
    await home.snapshots.close()  # nothing is stored meanwhile
    memory = (home.raw(ONE), home.raw(TWO))
    made = await home.add(memory)
    opened = await home.snapshots.open(made, "machine")
    for element in memory:
        assert str(home.snapshots.raws.memory(element.raw or "")).encode() in opened.memory_map
    assert opened.memory_map.count(b"\np ") > 0 and not opened.disk_below
    assert opened.disk_base.stat().st_size == home.base.blocks * 4096


async def test_one_that_nobody_needs_is_forgotten(home: Home):
    made = await home.add((home.raw(ONE),))
    async with home.snapshots.held(made.id):
        await home.end(made)
        await home.stored(made)
        assert home.snapshots.known(made.id)
    await until_async(lambda: home.snapshots.known(made.id) is None)
    assert await home.library.records.snapshot(made.id) is None
    await until_async(lambda: not home.files())


async def test_files_stay_as_long_as_a_machine_uses_them(home: Home):
    await home.snapshots.close()
    await home.restart()
    raw = home.raw(ONE)
    made = await home.add((raw,))
    await home.snapshots.open(made, "machine")
    await home.end(made)
    await until_async(lambda: home.snapshots.known(made.id) is None)
    home.snapshots.release("machine")
    await until_async(lambda: not home.files())


async def test_a_record_that_cannot_be_read_does_not_stop_the_start(home: Home):
    good, bad = await home.add((home.raw(ONE),)), await home.add((home.raw(TWO),))
    await home.stored(bad)
    row = to_row(bad)
    row.doc.clear()
    await home.library.records.put_snapshot(row)
    await home.restart()
    assert home.snapshots.known(good.id) and home.snapshots.known(bad.id) is None
    await home.stored(good)


async def test_a_machine_found_again_keeps_no_name_of_a_disk_that_it_has_open(home: Home):
    await home.snapshots.close()
    made = await home.add((home.raw(ONE),), (home.raw_disk(TWO),))
    await home.snapshots.open(made, "machine")
    await home.restart()
    home.snapshots.adopt(made.id, "machine")
    await home.stored(made)
    await until_async(lambda: not home.files())
