"""Sessions with a monitor that misbehaves at their beginning."""

import asyncio
import json

import pytest

from agentenv.engine.qemu import qmp
from agentenv.errors import InfraError

GREETING = {"QMP": {"version": {"qemu": {"micro": 0}, "package": ""}, "capabilities": []}}


async def monitor(tmp_path, firsts):
    """A monitor whose sessions begin with ``firsts[n]``, and then do as told."""
    sessions = iter(firsts)

    async def serve(reader, writer):
        def say(word):
            writer.write(json.dumps(word).encode() + b"\n")

        for word in next(sessions):
            say(word)
        while message := await reader.read(4096):  # the client ends them by no newline
            say({"return": {}} | {k: v for k, v in json.loads(message).items() if k == "id"})
        writer.close()

    return await asyncio.start_unix_server(serve, tmp_path / "qmp.sock")


async def test_a_session_that_is_greeted_twice_is_begun_again(tmp_path):
    server = await monitor(tmp_path, [[GREETING, GREETING], [GREETING]])
    async with server, qmp.connected(tmp_path / "qmp.sock") as session:
        assert await session.execute("cont") == {}


async def test_a_monitor_that_never_greets_well_is_given_up(tmp_path):
    async with await monitor(tmp_path, [[GREETING, GREETING]] * qmp.TRIES):
        with pytest.raises(InfraError) as caught:
            async with qmp.connected(tmp_path / "qmp.sock"):
                pass
    assert caught.value.code == "engine_unresponsive"


async def test_nobody_listens(tmp_path):
    with pytest.raises(InfraError) as caught:
        async with qmp.connected(tmp_path / "qmp.sock"):
            pass
    assert "No such file" in str(caught.value.why)
