"""From files of a node to layers in the store."""

import pytest
from tests.integration.snapshot.conftest import Home, flat, pages, until_async

from agentenv.snapshot.storing import CLAIM, MAX_DEPTH, keys
from agentenv.store.claims import read_claims

BELOW = pages(1, 0, 1, 2, 9)
ABOVE = {**pages(2, 1, 30), 2: None}


async def test_files_become_layers_of_equal_content(home: Home):
    memory, disk = home.raw(BELOW), home.raw_disk(ABOVE)
    path = home.snapshots.raws.memory(memory.raw or "")
    inode = path.stat().st_ino
    found = await home.stored(await home.add((memory,), (disk,)))
    assert await home.content(found.memory or ()) == flat(BELOW)
    assert await home.content(found.disk) == flat(ABOVE)
    layer = (found.memory or ())[0].layer or ""
    kept = home.folder / "cache" / layer[:2] / f"{layer}.data"
    assert kept.stat().st_ino == inode  # what was written once is not written twice
    await until_async(lambda: not home.files())


async def test_what_is_stored_is_claimed(home: Home):
    found = await home.stored(await home.add((home.raw(BELOW),)))
    await until_async(lambda: home.snapshots._storing.is_stored(found.id))
    claims, faults = await read_claims(home.library.layers.objects)
    (own,) = [keys for name, keys in claims.items() if name.endswith(f"{CLAIM}-{found.id}")]
    assert own == keys(found) and not faults


async def test_files_that_one_snapshot_has_become_one_layer(home: Home):
    last = pages(3, 30, 63)
    stack = tuple(home.raw(content) for content in (BELOW, ABOVE, last))
    found = await home.stored(await home.add(stack))
    assert len(found.memory or ()) == 1
    assert await home.content(found.memory or ()) == flat(BELOW, ABOVE, last)


async def test_a_file_that_others_have_stays_apart(home: Home):
    """Also where it lies between two that are the snapshot's own."""
    last = pages(3, 2, 63)
    await home.snapshots.close()  # nothing is stored before both are there
    first, middle, top = (home.raw(content) for content in (BELOW, ABOVE, last))
    made = await home.add((first, middle, top))
    other = await home.add((middle,))
    await home.restart()
    found, shared = await home.stored(made), await home.stored(other)
    assert await home.content(found.memory or ()) == flat(BELOW, ABOVE, last)
    assert await home.content(shared.memory or ()) == flat(ABOVE)
    assert set(shared.memory or ()) < set(found.memory or ())


async def test_a_deep_stack_is_made_flat_above_its_lowest_layer(home: Home):
    contents = [pages(seed, seed, seed + 1, 40) for seed in range(MAX_DEPTH + 1)]
    stack = (await home.stored(await home.add((home.raw(contents[0]),)))).memory or ()
    depths = [len(stack)]
    for content in contents[1:]:
        found = await home.stored(await home.add((*stack, home.raw(content))))
        stack = found.memory or ()
        depths.append(len(stack))
    assert depths == [*range(1, MAX_DEPTH + 1), 2]
    assert await home.content(stack) == flat(*contents)


async def test_one_that_cannot_be_stored_does_not_stop_the_others(home: Home):
    damaged = home.raw(BELOW)
    home.snapshots.raws.runs(damaged.raw or "").write_bytes(b"?")
    broken = await home.add((damaged,))
    found = await home.stored(await home.add((home.raw(ABOVE),)))
    assert await home.content(found.memory or ()) == flat(ABOVE)
    assert not home.is_stored(broken) and home.now(broken).raws


async def test_a_snapshot_made_of_files_that_became_layers_has_the_layers(home: Home):
    raw = home.raw(BELOW)
    first = await home.stored(await home.add((raw,)))
    later = await home.add((raw,))
    assert home.now(later).memory == first.memory


@pytest.mark.parametrize("times", [1, 2])
async def test_it_goes_on_after_a_restart(home: Home, times):
    await home.snapshots.close()
    made = [await home.add((home.raw(content),)) for content in (BELOW, ABOVE)]
    for _ in range(times):
        await home.restart()
    for manifest, content in zip(made, (BELOW, ABOVE), strict=True):
        found = await home.stored(manifest)
        assert await home.content(found.memory or ()) == flat(content)
