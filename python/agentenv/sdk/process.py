"""Processes in a sandbox, by the in-guest protocol (E2B.md §2.4)."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from agentenv.errors import GuestError, NotFound, UserError
from agentenv.sdk.client import Client, unreachable
from agentenv.sdk.envelope import END_OF_STREAM, Decoder, encode

ENVD_PORT = 49983
# Output may pause for as long as the command thinks; the agent sends keepalives meanwhile.
STREAM_TIMEOUT = httpx.Timeout(None, connect=10.0)
KEEPALIVE_SECONDS = 50
_USER_FAULTS = {"invalid_argument", "unauthenticated", "already_exists", "failed_precondition"}


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
    """``exit_code`` as the agent gives it: -1 with ``exited`` False when a signal ended it."""

    exit_code: int
    exited: bool
    status: str


Event = Started | Output | Ended


class Processes:
    """Starts and feeds processes of one sandbox; ``sandbox`` is an answer of create or get."""

    def __init__(self, client: Client, sandbox: Mapping[str, Any]) -> None:
        self._client = client
        self._headers = {
            "E2b-Sandbox-Id": str(sandbox["sandboxID"]),
            "E2b-Sandbox-Port": str(ENVD_PORT),
            "Connect-Protocol-Version": "1",
        }
        if token := sandbox.get("envdAccessToken"):
            self._headers["X-Access-Token"] = token

    async def start(
        self,
        argv: tuple[str, ...],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Start ``argv`` and yield its events; leaving the generator does not end the process.

        In a ``terminal`` all output is of stream ``pty``, and input goes by ``send_keys``.
        Raises UserError for what the guest refuses, GuestError when the stream breaks off.
        """
        config: dict[str, Any] = {"cmd": argv[0], "args": list(argv[1:]), "envs": dict(env or {})}
        if cwd:
            config["cwd"] = cwd
        request: dict[str, Any] = {"process": config, "stdin": stdin}
        if terminal is not None:
            request["pty"] = terminal.message()
        async with aclosing(self._stream("Start", request, user)) as messages:
            async for message in messages:
                if (event := _event(message.get("event", {}))) is not None:
                    yield event

    async def send_stdin(self, pid: int, data: bytes) -> None:
        chunk = base64.b64encode(data).decode()
        await self._unary("SendInput", {"process": {"pid": pid}, "input": {"stdin": chunk}})

    async def send_keys(self, pid: int, data: bytes) -> None:
        """Type into the terminal of a process that was started in one."""
        chunk = base64.b64encode(data).decode()
        await self._unary("SendInput", {"process": {"pid": pid}, "input": {"pty": chunk}})

    async def resize(self, pid: int, size: TerminalSize) -> None:
        await self._unary("Update", {"process": {"pid": pid}, "pty": size.message()})

    async def close_stdin(self, pid: int) -> None:
        await self._unary("CloseStdin", {"process": {"pid": pid}})

    async def signal(self, pid: int, name: str) -> None:
        """``name``: ``SIGTERM`` or ``SIGKILL``. Raises NotFound if there is no such process."""
        await self._unary("SendSignal", {"process": {"pid": pid}, "signal": f"SIGNAL_{name}"})

    async def _unary(self, method: str, request: dict[str, Any]) -> Any:
        try:
            response = await self._client.http.post(
                f"/process.Process/{method}", headers=self._headers, json=request
            )
        except httpx.HTTPError as error:
            raise unreachable(self._client.address.url, error) from error
        if response.is_error:
            raise _fault(response.json())
        return response.json()

    async def _stream(
        self, method: str, request: dict[str, Any], user: str | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        headers = {
            **self._headers,
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(KEEPALIVE_SECONDS),
        }
        if user:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        decoder = Decoder()
        try:
            async with self._client.http.stream(
                "POST",
                f"/process.Process/{method}",
                headers=headers,
                content=encode(request),
                timeout=STREAM_TIMEOUT,
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise _fault(response.json())
                async for data in response.aiter_raw():
                    for flags, message in decoder.feed(data):
                        if flags & END_OF_STREAM:
                            if "error" in message:
                                raise _fault(message["error"])
                            return
                        yield message
        except httpx.ConnectError as error:
            raise unreachable(self._client.address.url, error) from error
        except httpx.HTTPError as error:
            raise GuestError(
                "the connection to the sandbox broke off",
                why=str(error) or type(error).__name__,
                fix="`aenv inspect` says whether it still lives",
                code="guest_connection_lost",
            ) from error


def _event(event: Mapping[str, Any]) -> Event | None:
    if start := event.get("start"):
        return Started(int(start["pid"]))
    if data := event.get("data"):
        stream, text = next(iter(dict[str, str](data).items()))
        return Output(stream, base64.b64decode(text))
    if (end := event.get("end")) is not None:
        return Ended(int(end.get("exitCode", 0)), bool(end.get("exited")), end.get("status", ""))
    return None  # keepalive, or an event of a later version


def _fault(error: Mapping[str, Any]) -> Exception:
    code, message = str(error.get("code", "unknown")), str(error.get("message", ""))
    if code in {"not_found", "404"}:
        return NotFound(message)
    if code in _USER_FAULTS:
        return UserError(message, code=code)
    return GuestError(message or "the guest refused", code="guest_" + code)
