"""The control channel: JSON lines over a stream to the agent.

A virtio-serial port is one byte stream that outlives us: an answer to a question of an earlier
server may still arrive, and a line may begin in the middle. So every connection starts with a blank
line, and answers are matched by id.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import socket
from pathlib import Path
from typing import Any

from agentenv.concurrency import Tasks
from agentenv.errors import GuestError, InfraError

MAX_LINE = 4 << 20  # bytes


class LineControl:
    """Implements ``ControlChannel`` over a stream; several calls may be under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        # A random start: ids of an earlier connection must not match ours.
        self._ids = itertools.count(secrets.randbelow(1 << 40))
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks = Tasks()
        self._tasks.start(self._receive(), "control channel")

    @classmethod
    async def open(cls, path: Path) -> LineControl:
        """One at a unix socket. Raises InfraError if the engine's socket does not answer."""
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE)
        except OSError as error:
            raise InfraError(
                "the machine's control socket does not answer", why=str(error)
            ) from error
        writer.write(b"\n")
        return cls(reader, writer)

    @classmethod
    async def on(cls, connected: socket.socket, greeting: bytes) -> LineControl:
        """One on a connected socket, which becomes its own; ``greeting`` goes first."""
        reader, writer = await asyncio.open_connection(sock=connected, limit=MAX_LINE)
        writer.write(greeting + b"\n")
        return cls(reader, writer)

    async def call(self, op: str, args: dict[str, Any] | None = None, *, timeout: float) -> Any:
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        line = json.dumps({"id": number, "op": op, "args": args or {}}).encode() + b"\n"
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(line)
                await self._writer.drain()
                return await answer
        except TimeoutError:
            raise GuestError(
                f"the guest's agent did not answer {op!r} within {timeout:g} s",
                code="guest_unresponsive",
            ) from None
        except OSError as error:
            raise _cut_off(str(error)) from error
        finally:
            self._waiting.pop(number, None)

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    async def close(self) -> None:
        await self._tasks.close()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _receive(self) -> None:
        try:
            while line := await self._reader.readline():
                self._take(line)
            reason = "the machine closed it"
        except (OSError, ValueError) as error:
            reason = str(error)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_cut_off(reason))

    def _take(self, line: bytes) -> None:
        """One line; what is no answer to a call of ours is noise of an earlier conversation."""
        try:
            reply = json.loads(line)
            answer = self._waiting.get(reply["id"])
        except (ValueError, TypeError, KeyError):
            return
        if answer is None or answer.done():
            return
        if "error" in reply:
            fault = reply["error"]
            answer.set_exception(
                GuestError(
                    f"the guest's agent refused: {fault.get('message', '')}",
                    code=f"guest_{fault.get('code', 'failed')}",
                )
            )
        else:
            answer.set_result(reply.get("ok"))


def _cut_off(reason: str) -> GuestError:
    return GuestError(
        "the control channel to the guest broke off", why=reason, code="guest_unresponsive"
    )
