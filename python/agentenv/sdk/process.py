"""Processes in a sandbox as events, by the in-guest protocol (E2B.md §2.4)."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from agentenv.sdk.client import Client
from agentenv.sdk.guest import Guest


@dataclass(frozen=True, slots=True)
class Started:
    pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of output; ``stream`` is ``stdout``, ``stderr`` or ``pty``."""

    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """In characters."""

    cols: int
    rows: int

    def message(self) -> dict[str, Any]:
        return {"size": {"cols": self.cols, "rows": self.rows}}


@dataclass(frozen=True, slots=True)
class Ended:
    """``exit_code`` as the agent gives it: -1 with ``exited`` False when a signal ended it.

    ``out_of_memory``: the guest's kernel killed it, or one it started, for want of memory.
    """

    exit_code: int
    exited: bool
    status: str
    out_of_memory: bool = False


Event = Started | Output | Ended


class Processes:
    """Starts and feeds processes of one sandbox; ``sandbox`` is an answer of create or get."""

    def __init__(self, client: Client, sandbox: Mapping[str, Any]) -> None:
        self._guest = Guest(client, sandbox)

    def start(
        self,
        argv: tuple[str, ...],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
        tag: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Start ``argv`` and yield its events; leaving the generator does not end the process.

        In a ``terminal`` all output is of stream ``pty``, and input goes by ``send_keys``. After
        ``deadline`` seconds the guest kills it and all it started: UserError
        (``deadline_exceeded``) follows the output so far. Else as ``Guest``.
        """
        config: dict[str, Any] = {"cmd": argv[0], "args": list(argv[1:]), "envs": dict(env or {})}
        if cwd:
            config["cwd"] = cwd
        request: dict[str, Any] = {"process": config, "stdin": stdin}
        if terminal is not None:
            request["pty"] = terminal.message()
        if tag:
            request["tag"] = tag
        return _events(self._guest.stream("process.Process/Start", request, user, deadline))

    def connect(self, pid: int) -> AsyncGenerator[Event, None]:
        """Events of a process that runs, from now on. Raises NotFound."""
        request = {"process": {"pid": pid}}
        return _events(self._guest.stream("process.Process/Connect", request))

    async def list(self) -> list[dict[str, Any]]:
        """Those that run: ``pid``, ``config`` (cmd, args, envs, cwd) and ``tag``."""
        return (await self._guest.call("process.Process/List", {}))["processes"]

    async def send_stdin(self, pid: int, data: bytes) -> None:
        chunk = base64.b64encode(data).decode()
        await self._tell("SendInput", pid, input={"stdin": chunk})

    async def send_keys(self, pid: int, data: bytes) -> None:
        """Type into the terminal of a process that was started in one."""
        chunk = base64.b64encode(data).decode()
        await self._tell("SendInput", pid, input={"pty": chunk})

    async def resize(self, pid: int, size: TerminalSize) -> None:
        await self._tell("Update", pid, pty=size.message())

    async def close_stdin(self, pid: int) -> None:
        await self._tell("CloseStdin", pid)

    async def signal(self, pid: int, name: str) -> None:
        """``name``: ``SIGTERM`` or ``SIGKILL``, for it and all that it started. Raises NotFound if
        there is no such process."""
        await self._tell("SendSignal", pid, signal=f"SIGNAL_{name}")

    async def _tell(self, method: str, pid: int, **what: Any) -> None:
        await self._guest.call(f"process.Process/{method}", {"process": {"pid": pid}, **what})


async def _events(
    messages: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[Event, None]:
    async with aclosing(messages):
        async for message in messages:
            if (event := _event(message.get("event", {}))) is not None:
                yield event


def _event(event: Mapping[str, Any]) -> Event | None:
    if start := event.get("start"):
        return Started(int(start["pid"]))
    if data := event.get("data"):
        stream, text = next(iter(dict[str, str](data).items()))
        return Output(stream, base64.b64decode(text))
    if (end := event.get("end")) is not None:
        return Ended(
            int(end.get("exitCode", 0)),
            bool(end.get("exited")),
            end.get("status", ""),
            bool(end.get("outOfMemory")),
        )
    return None  # keepalive, or an event of a later version
