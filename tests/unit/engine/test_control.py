import asyncio
import json

import pytest

from agentenv.engine.control import LineControl
from agentenv.errors import GuestError, InfraError


class Guest:
    """A guest's end of the port that answers as it is told."""

    def __init__(self, answer):
        self._answer = answer
        self.lines = []

    async def serve(self, reader, writer):
        while line := await reader.readline():
            if line.strip():
                self.lines.append(json.loads(line))
                for reply in self._answer(self.lines[-1]):
                    writer.write(
                        reply if isinstance(reply, bytes) else json.dumps(reply).encode() + b"\n"
                    )
            else:
                self.lines.append(None)
        writer.close()


@pytest.fixture
async def channel(tmp_path):
    opened = []

    async def open_to(answer):
        guest = Guest(answer)
        server = await asyncio.start_unix_server(guest.serve, tmp_path / "s")
        control = await LineControl.open(tmp_path / "s")
        opened.append((control, server))
        return control, guest

    yield open_to
    for control, server in opened:
        await control.close()
        server.close()


async def test_a_call_is_answered(channel):
    control, guest = await channel(lambda q: [{"id": q["id"], "ok": {"got": q["args"]}}])
    assert await control.call("echo", {"a": 1}, timeout=5) == {"got": {"a": 1}}
    assert guest.lines[0] is None  # the blank line that ends a former conversation's rest


async def test_calls_under_way_are_told_apart(channel):
    waiting = []

    def answer(q):
        waiting.append(q)
        if len(waiting) < 2:
            return []
        return [{"id": x["id"], "ok": x["op"]} for x in reversed(waiting)]

    control, _ = await channel(answer)
    assert await asyncio.gather(control.call("one", timeout=5), control.call("two", timeout=5)) == [
        "one",
        "two",
    ]


async def test_noise_and_answers_to_others_are_passed_over(channel):
    control, _ = await channel(
        lambda q: [
            b"rest of a line\n",
            b"[1]\n",
            b'"x"\n',
            {"id": 1, "ok": 0},
            {"id": q["id"], "ok": 7},
        ]
    )
    assert await control.call("x", timeout=5) == 7


async def test_a_refusal_carries_the_guests_code(channel):
    control, _ = await channel(
        lambda q: [{"id": q["id"], "error": {"code": "busy", "message": "not now"}}]
    )
    with pytest.raises(GuestError) as caught:
        await control.call("x", timeout=5)
    assert caught.value.code == "guest_busy" and "not now" in caught.value.message


async def test_silence_is_told_with_its_length(channel):
    control, _ = await channel(lambda _: [])
    with pytest.raises(GuestError) as caught:
        await control.call("x", timeout=0.05)
    assert caught.value.code == "guest_unresponsive" and "0.05" in caught.value.message


async def test_a_connection_that_ends_ends_its_calls(tmp_path):
    async def hang_up(reader, writer):
        await reader.readline()
        await reader.readline()
        writer.close()

    async with await asyncio.start_unix_server(hang_up, tmp_path / "s"):
        control = await LineControl.open(tmp_path / "s")
        with pytest.raises(GuestError) as caught:
            await control.call("x", timeout=30)
        assert caught.value.code == "guest_unresponsive"
        await control.close()
        assert control.closed


async def test_nobody_there(tmp_path):
    with pytest.raises(InfraError):
        await LineControl.open(tmp_path / "none")
