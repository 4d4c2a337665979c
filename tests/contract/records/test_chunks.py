"""The index of chunks, on each database."""

import pytest

from agentenv.store.sql import SqlRecords

ONE, TWO = "aa" * 32, "bb" * 32


def chunk(number: int, pack: str):
    return (number.to_bytes(32, "big"), 1000 + number, 8, 1, pack, number << 20)


@pytest.fixture
async def chunks(tmp_path):
    records = await SqlRecords.open_sqlite(tmp_path / "state.db")
    yield records.chunks
    await records.close()


async def test_chunks_are_found_where_they_were_seen_last(chunks):
    await chunks.add_pack(ONE, [chunk(1, ONE), chunk(2, ONE)])
    await chunks.add_pack(TWO, [chunk(2, TWO), chunk(3, TWO)])
    wanted = [chunk(number, ONE)[0] for number in range(5)]
    found = await chunks.find(wanted)
    assert found == {c[0]: c for c in (chunk(1, ONE), chunk(2, TWO), chunk(3, TWO))}
    assert await chunks.packs() == {ONE, TWO}


async def test_a_dropped_pack_takes_its_chunks_along(chunks):
    await chunks.add_pack(ONE, [chunk(1, ONE), chunk(2, ONE)])
    await chunks.add_pack(TWO, [chunk(2, TWO)])
    await chunks.drop_packs([ONE, "unknown"])
    assert await chunks.find([chunk(1, ONE)[0], chunk(2, ONE)[0]]) == {
        chunk(2, TWO)[0]: chunk(2, TWO)
    }
    await chunks.add_pack(ONE, [chunk(1, ONE)])
    await chunks.add_pack(ONE, [chunk(1, ONE)])  # already so is success
    assert len(await chunks.find([chunk(1, ONE)[0]])) == 1


async def test_more_chunks_than_a_statement_takes(chunks):
    many = [chunk(number, ONE) for number in range(20_000)]
    await chunks.add_pack(ONE, many)
    found = await chunks.find([c[0] for c in many])
    assert len(found) == 20_000 and found[many[777][0]] == many[777]
