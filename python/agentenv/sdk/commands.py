"""Commands: run one and have its result, or hold on to one that runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.concurrency import Tasks
from agentenv.errors import GuestError, NotFound, UserError
from agentenv.sdk.process import Ended, Event, Output, Processes, Started, TerminalSize

SHELL = ("/bin/sh", "-c")
STDIN_CHUNK = 256 << 10  # bytes of one request


@dataclass(frozen=True, slots=True)
class Result:
    """``exit_code`` as a shell has it, 128 + signal; output of a terminal is all ``stdout``."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Standard output as text; what is none is replaced."""
        return self.stdout.decode(errors="replace")


class CommandFailed(UserError):
    """The command ended with another exit code than 0; ``result`` has its output."""

    code = "command_failed"
    http_status = 422

    def __init__(self, what: str, result: Result) -> None:
        super().__init__(what, exit_code=result.exit_code)
        self.result = result


class CommandTimedOut(UserError):
    """Its deadline passed: it and all it started were killed; ``result`` has the output so far."""

    code = "command_timed_out"
    http_status = 504

    def __init__(self, what: str, result: Result) -> None:
        super().__init__(what, fix="give a longer timeout")
        self.result = result


class OutOfMemory(GuestError):
    """The sandbox's memory was exhausted and its kernel killed the command, or part of it."""

    code = "guest_out_of_memory"

    def __init__(self, what: str, result: Result) -> None:
        super().__init__(what, why="the sandbox ran out of memory", fix="give it more memory")
        self.result = result


class Running:
    """A command that was started: iterate over its output, feed it, wait for it, end it.

    ``async with`` ends it on the way out, if it still runs. Output is kept for ``wait``.
    """

    def __init__(self, processes: Processes, what: str, events: AsyncGenerator[Event, None]):
        self._processes, self._what, self._events = processes, what, events
        self._turn = asyncio.Lock()
        self._lost = False
        self._out: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._end: Ended | None = None
        self.pid = 0

    async def begin(self) -> Running:
        async for event in self._events:
            if isinstance(event, Started):
                self.pid = event.pid
                return self
        raise GuestError("the command's stream ended before its start", code="guest_protocol")

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._end is None:
            await self.kill()
        await self._events.aclose()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._output()

    async def _output(self) -> AsyncGenerator[Output, None]:
        if self._lost and self._end is None:
            self._events = self._processes.connect(self.pid)
            self._lost = False
        try:
            async for event in self._events:
                if isinstance(event, Output):
                    name = "stderr" if event.stream == "stderr" else "stdout"
                    self._out[name] += event.data
                    yield event
                elif isinstance(event, Ended):
                    self._end = event
        except asyncio.CancelledError:
            self._lost = True  # the stream ended with who waited; the next one opens another
            raise
        except UserError as error:
            if error.code != "deadline_exceeded":
                raise
            self._end = Ended(-1, False, "signal: killed")
            raise CommandTimedOut(f"{self._what}: its time was over", self.result) from error

    @property
    def result(self) -> Result:
        code = exit_code(self._end) if self._end else -1
        return Result(code, bytes(self._out["stdout"]), bytes(self._out["stderr"]))

    async def wait(self, *, check: bool = True) -> Result:
        """Its result. With ``check`` raises CommandFailed for an exit code other than 0;
        always CommandTimedOut and OutOfMemory. After a wait that was cancelled, output that came
        meanwhile is missing."""
        async with self._turn:
            if self._end is None:
                async for _ in self:
                    pass
        if self._end is None:
            raise GuestError("the command's stream ended without its end", code="guest_protocol")
        result = self.result
        if self._end.out_of_memory and result.exit_code != 0:
            raise OutOfMemory(f"{self._what}: {self._end.status}", result)
        if check and result.exit_code != 0:
            raise CommandFailed(f"{self._what}: {self._end.status}{_last_line(result)}", result)
        return result

    async def send(self, data: bytes) -> None:
        """To its standard input."""
        await self._processes.send_stdin(self.pid, data)

    async def type(self, keys: bytes) -> None:
        """Into its terminal."""
        await self._processes.send_keys(self.pid, keys)

    async def close_stdin(self) -> None:
        await self._processes.close_stdin(self.pid)

    async def resize(self, cols: int, rows: int) -> None:
        await self._processes.resize(self.pid, TerminalSize(cols, rows))

    async def terminate(self) -> None:
        """SIGTERM, to it and all it started."""
        await self._signal("SIGTERM")

    async def kill(self) -> None:
        """SIGKILL, to it and all it started; one that has ended already is success."""
        await self._signal("SIGKILL")

    async def _signal(self, name: str) -> None:
        with contextlib.suppress(NotFound):  # of the process, or of its sandbox
            await self._processes.signal(self.pid, name)


class Commands:
    """Commands of one sandbox. A text is run by the shell, a sequence as program and arguments."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        check: bool = True,
        stdin: bytes | None = None,
        **options: Any,
    ) -> Result:
        """Run it to its end; ``options`` as for ``start``. Raises CommandFailed (unless ``check``
        is false), CommandTimedOut, OutOfMemory, and as ``Guest``."""
        running = await self.start(command, timeout=timeout, stdin=stdin is not None, **options)
        tasks = Tasks()
        try:
            async with running:
                if stdin is not None:
                    tasks.start(_feed(running, stdin), "stdin")
                return await running.wait(check=check)
        finally:
            await tasks.close()

    async def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Running:
        """Start it. The guest kills it ``timeout`` seconds from now, whoever still listens."""
        argv = (*SHELL, command) if isinstance(command, str) else tuple(command)
        if not argv:
            raise UserError("the command is empty")
        events = self._processes.start(
            argv, env=env, cwd=cwd, user=user, stdin=stdin, terminal=terminal, tag=tag,
            deadline=timeout,
        )  # fmt: skip
        return await Running(self._processes, _short(command), events).begin()

    async def connect(self, pid: int) -> Running:
        """Hold on to one that runs already: its output from now on. Raises NotFound."""
        return await Running(
            self._processes, f"process {pid}", self._processes.connect(pid)
        ).begin()

    async def list(self) -> list[dict[str, Any]]:
        """Those that run, as ``Processes.list``."""
        return await self._processes.list()


async def _feed(running: Running, data: bytes) -> None:
    """All of it, while the output is read; a command that reads no more is no fault of ours."""
    with contextlib.suppress(UserError):
        for at in range(0, len(data), STDIN_CHUNK):
            await running.send(data[at : at + STDIN_CHUNK])
        await running.close_stdin()


def _short(command: str | Sequence[str]) -> str:
    text = command if isinstance(command, str) else " ".join(command)
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _last_line(result: Result) -> str:
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return f" ({lines[-1][:200]})" if lines else ""


SIGNALLED = 128  # a shell's convention: 128 + signal number
_SIGNALS = {"killed": 9, "terminated": 15, "interrupt": 2, "aborted": 6, "segmentation fault": 11,
            "hangup": 1, "quit": 3, "illegal instruction": 4, "bus error": 7,
            "floating point exception": 8, "broken pipe": 13, "alarm clock": 14}  # fmt: skip


def exit_code(end: Ended) -> int:
    """As a shell would have it."""
    if end.exited or end.exit_code >= 0:
        return end.exit_code
    name = end.status.removeprefix("signal: ").split(" (")[0]
    number = name.removeprefix("signal ")
    return SIGNALLED + (int(number) if number.isdigit() else _SIGNALS.get(name, 1))
