"""The collection: deletes what nobody needs, never what somebody does, killed at any step, beside
writers, on each kind of store."""

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess

import pytest
from tests.contract.store.homes import child_script, home_on, noise

from agentenv.errors import InfraError
from agentenv.host.mount import mounted
from agentenv.store import lease as leases


@pytest.fixture(params=["directory", "s3"])
def url(request, tmp_path):
    if request.param == "directory":
        return str(tmp_path / "store")
    return request.getfixturevalue("s3_keys").url(f"gc/{secrets.token_hex(4)}")


@pytest.fixture
async def home(url, tmp_path):
    async with home_on(url, tmp_path / "home") as home:
        yield home


async def test_what_nobody_claims_goes_and_the_rest_stays(home):
    kept = await home.add("kept", noise(1, 100))
    lost = await home.add("lost", noise(2, 100))
    await home.claims.drop("lost")
    planned = await home.collection.run(dry=True)
    assert f"layer/{lost.layer}" in planned.deleted and len(planned.deleted) == 2
    assert f"layer/{lost.layer}" in await home.keys()
    done = await home.collection.run()
    assert done.deleted == planned.deleted and done.deleted_bytes == planned.deleted_bytes
    assert await home.read(kept) == noise(1, 100)
    assert sorted(key.partition("/")[0] for key in await home.keys()) == ["claim", "layer", "pack"]
    assert await home.records.chunks.packs() == {
        key.removeprefix("pack/") for key in await home.keys("pack/")
    }
    assert not (await home.collection.run()).deleted


async def test_a_pack_that_is_mostly_dead_is_compacted(home):
    big, part = noise(3, 1000), noise(3, 1000)[: 200 * 4096]
    first = await home.add("big", big)
    second = await home.add("part", part)
    shared = (await home.layers.table(second.layer)).packs
    assert set(shared) & set((await home.layers.table(first.layer)).packs)
    await home.claims.drop("big")
    done = await home.collection.run()
    assert done.compacted and set(done.compacted) <= set(shared)
    table = await home.layers.table(second.layer)
    assert not set(table.packs) & set(done.compacted) and table.id == second.layer
    assert await home.read(second) == part
    stored = sum(entry.size for entry in await home.objects.list("pack/"))
    assert stored < 300 * 4096
    before = await home.keys("pack/")
    assert await home.add("again", part) == second  # the index knows the new places
    assert await home.keys("pack/") == before


async def test_another_homes_claims_count(home, url, tmp_path):
    part = await home.add("mine", noise(4, 50))
    async with home_on(url, tmp_path / "other", "other") as other:
        assert await other.add("theirs", noise(4, 50)) == part
        await home.claims.drop("mine")
        assert not [key for key in (await home.collection.run()).deleted if "layer" in key]
        assert await other.read(part) == noise(4, 50)
        await other.claims.drop("theirs")
        assert f"layer/{part.layer}" in (await home.collection.run()).deleted


async def test_what_a_writer_uses_stays_until_it_is_done(home):
    async with leases.hold(home.objects) as lease:
        part = await home.write(noise(5, 50), lease)
        done = await home.collection.run()
        assert not done.deleted and f"layer/{part.layer}" in done.kept
    assert f"layer/{part.layer}" in (await home.collection.run()).deleted
    assert await home.keys() == []


async def test_the_lease_of_a_writer_that_was_killed_holds_nothing(home, url, tmp_path):
    body = """
async with leases.hold(home.objects) as lease:
    await home.write(noise(6, 50), lease)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    child = subprocess.run(child_script(body, url, tmp_path / "other"), capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert len(await home.keys("layer/")) == 1
    assert len((await home.collection.run()).deleted) == 2
    assert await home.keys() == []


async def test_a_writer_waits_for_what_is_about_to_go(home):
    key = "layer/" + "ab" * 32
    mark = leases.CONDEMNED + key
    await home.objects.put(mark, leases.own_process())
    async with leases.hold(home.objects) as lease:
        waiting = asyncio.ensure_future(lease.use([key, "layer/other"]))
        await lease.use(["pack/" + "cd" * 32])  # nobody else's marks matter
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
        await home.objects.delete([mark])
        await waiting


async def test_a_mark_that_is_too_old_holds_nobody_up(home, monkeypatch):
    monkeypatch.setattr(leases, "MARK_LIFETIME", -1.0)
    key = "layer/" + "ab" * 32
    await home.objects.put(leases.CONDEMNED + key, b"another machine's")
    async with leases.hold(home.objects) as lease:
        await asyncio.wait_for(lease.use([key]), 5)


async def test_a_process_of_another_namespace_is_not_taken_for_dead():
    owner = json.loads(leases.own_process())
    gone = {**owner, "start": 1}
    assert leases.died_here(json.dumps(gone).encode())
    for elsewhere in ({"pids": 1}, {"boot": "another"}):
        assert not leases.died_here(json.dumps({**gone, **elsewhere}).encode())
    for strange in (b"", b"{}", b"[" * 5000, b'{"pid": "x", "boot": 1, "pids": 2, "start": 3}'):
        assert not leases.died_here(strange)


async def test_a_lease_that_was_silent_too_long_is_not_brought_back(home, monkeypatch):
    monkeypatch.setattr(leases, "LIFETIME", 0.2)
    async with leases.hold(home.objects) as lease:
        await asyncio.sleep(0.15)  # more than half of its life
        await lease.renew()
        with pytest.raises(InfraError) as caught:
            lease.check()
        assert caught.value.code == "lease_lost"


@pytest.mark.parametrize("uses", [b"{", b"5", b"[1]", b"[" * 5000, b'{"a": []}'])
async def test_a_lease_that_cannot_be_read_stops_the_collection(home, uses):
    await home.objects.put("lease/x/alive", b"{}")
    await home.objects.put("lease/x/uses-1", uses)
    await home.add("lost", noise(12, 20))
    await home.claims.drop("lost")
    with pytest.raises(InfraError) as caught:
        await home.collection.run()
    assert caught.value.code == "store_damaged" and "lease/x/uses-1" in caught.value.message
    await home.objects.delete(["lease/x/uses-1"])
    assert (await home.collection.run()).deleted


async def test_a_full_store_can_be_emptied(tmp_path):
    async with (
        mounted("tmpfs", "tmpfs", ("size=4m",)) as disk,
        home_on(str(disk / "store"), tmp_path / "home") as home,
    ):
        kept = await home.add("kept", noise(13, 100))
        await home.add("lost", noise(14, 400))
        await home.claims.drop("lost")
        filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(filler, bytes(4096))
        os.close(filler)
        with pytest.raises(InfraError) as caught:
            await home.add("more", noise(15, 400))
        assert caught.value.code == "disk_full"
        assert len((await home.collection.run()).deleted) == 2
        assert await home.read(kept) == noise(13, 100) and await home.whole()


async def test_a_claim_that_cannot_be_read_stops_the_collection(home):
    await home.add("one", noise(7, 20))
    await home.objects.put("claim/x/image-bad", b"{")
    before = await home.keys()
    with pytest.raises(InfraError) as caught:
        await home.collection.run()
    assert caught.value.code == "store_damaged" and "claim/x/image-bad" in caught.value.message
    assert await home.keys() == before


async def test_an_index_that_knows_too_much_does_no_harm(home, url, tmp_path):
    await home.add("one", noise(8, 50))
    async with home_on(url, tmp_path / "other", "other") as other:
        await other.layers.learn()  # of a pack that goes now
        await home.claims.drop("one")
        await home.collection.run()
        part = await other.add("two", noise(8, 50))
        assert await other.read(part) == noise(8, 50)
        assert await other.whole()


async def test_two_homes_race_to_store_the_same_layer(home, url, tmp_path):
    async with home_on(url, tmp_path / "other", "other") as other:
        one, two = await asyncio.gather(
            home.add("one", noise(9, 300)), other.add("two", noise(9, 300))
        )
        assert one == two and await home.whole()
        assert len(await home.keys("pack/")) == 1


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("url", ["directory"], indirect=True)
async def test_killed_at_every_step_it_leaves_the_store_right(home, url, tmp_path, stride):
    """Each round kills the collection some calls to the store later than the round before."""
    body = """
calls, step = 0, int(os.environ["STEP"])
for name in ("put", "put_file", "get", "head", "list", "delete"):
    def counted(call):
        async def act(*args):
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return await call(*args)
        return act
    setattr(home.objects, name, counted(getattr(home.objects, name)))
await home.collection.run()
"""
    keep = await home.add("keep", noise(10, 30))
    for step in range(1, 400, stride):
        big, part = noise(1000 + step, 60), noise(1000 + step, 60)[: 12 * 4096]
        await home.add("big", big)
        kept = await home.add("part", part)
        await home.claims.drop("big")
        child = subprocess.run(
            child_script(body, url, tmp_path / "other"),
            env={"STEP": str(step), "PATH": "/usr/bin:/bin"},
            capture_output=True,
        )
        assert await home.whole(), f"step {step}"
        assert await home.read(keep) == noise(10, 30) and await home.read(kept) == part
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()
        await home.collection.run()
        assert await home.whole() and len(await home.keys("layer/")) == 2
    else:
        pytest.fail("the collection never came to its end")
    assert step > 20, "it was not killed often enough to mean anything"
    await home.collection.run()
    assert await home.keys("condemned/") == await home.keys("lease/") == []


async def test_writers_and_collections_at_once(home, url, tmp_path):
    """Two homes write, claim and drop layers that share chunks, while both collect."""
    rounds = 12 if url.startswith("/") else 5
    async with home_on(url, tmp_path / "other", "other") as other:

        async def live(each, seed):
            chance = random.Random(seed)
            for number in range(rounds):
                begin = chance.randrange(0, 200)
                content = noise(11, 400)[begin * 4096 : (begin + 150) * 4096]
                await each.add(f"image{number % 4}", content)
                if chance.random() < 0.5:
                    await each.claims.drop(f"image{chance.randrange(4)}")

        async def collect(each):
            for _ in range(rounds):
                await each.collection.run()

        await asyncio.gather(live(home, 1), live(other, 2), collect(home), collect(other))
        assert await home.whole()
        await home.collection.run()
        assert await home.whole() and await home.keys("condemned/") == []
