"""The client of a block server that is killed and started again."""

import asyncio
import json
import socket

import pytest

from agentenv.errors import InfraError
from agentenv.layer.blockd import BlockClient


@pytest.fixture
def client(tmp_path):
    return BlockClient(tmp_path / "control.sock", tmp_path)


def dead(path):
    """What a killed server leaves: a socket at which nobody listens."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


async def test_one_that_starts_again_is_asked_again(client, tmp_path):
    path = tmp_path / "control.sock"
    dead(path)
    asked = asyncio.create_task(client.stats())
    await asyncio.sleep(0)
    path.unlink()
    calls = 0

    async def answer(reader, writer):
        nonlocal calls
        calls += 1
        request = json.loads(await reader.readline())
        if calls > 1:  # the first dies over the question
            writer.write(json.dumps({"ok": {"op": request["op"]}}).encode() + b"\n")
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        assert await asked == {"op": "stats"}
    assert calls == 2


async def test_where_none_was_none_is_waited_for(client, monkeypatch):
    monkeypatch.setattr(asyncio, "sleep", None)  # it would fail
    with pytest.raises(InfraError, match="does not answer"):
        await client.rescan()


async def test_one_that_stays_away_is_told(client, tmp_path):
    dead(tmp_path / "control.sock")
    with pytest.raises(InfraError, match="does not answer"):
        await client.hello()
