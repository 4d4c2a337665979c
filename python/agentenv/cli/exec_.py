"""`aenv exec`: a command in a running sandbox; its exit code is ours."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import aclosing
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from agentenv.cli.server import Home, SandboxId, Url, ask
from agentenv.cli.start_ import Env, User, Workdir, pairs
from agentenv.concurrency import Tasks
from agentenv.errors import GuestError, UserError
from agentenv.sdk.client import Client
from agentenv.sdk.commands import exit_code
from agentenv.sdk.process import Ended, Output, Processes, Started

STDIN_CHUNK = 32 << 10
TIMED_OUT = 124  # timeout(1)'s exit code
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds it may run", min=0.001)]


class CommandVerb(TyperCommand):
    """A verb whose last words are a command: with `--` what stands before it is ours, without it
    the first word behind the target begins the command, as with docker."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = "--" in args
        return super().parse_args(ctx, args)


OPTIONS = {"cls": CommandVerb}


def command(
    sandbox_id: SandboxId,
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="Program, arguments")],
    user: User = None,
    workdir: Workdir = None,
    env: Env = None,
    timeout: Timeout = None,
    home: Home = None,
    url: Url = None,
) -> None:
    """Run a command in a sandbox. Output streams, piped input is passed on, so is the exit code.

    After --timeout it and all it started are killed, and the exit code is 124, as timeout(1)'s.

    Examples: aenv exec a1b2… ls -l /    tar c . | aenv exec a1b2… -- tar x -C /srv
    """

    async def work(client: Client) -> int:
        processes = Processes(client, await client.sandbox(sandbox_id))
        return await run_process(
            processes, tuple(words), env=pairs("--env", env), cwd=workdir, user=user,
            deadline=timeout,
        )  # fmt: skip

    raise typer.Exit(ask(home, url, work))


async def run_process(
    processes: Processes,
    argv: tuple[str, ...],
    *,
    env: dict[str, str],
    cwd: str | None,
    user: str | None,
    deadline: float | None = None,
) -> int:
    """Run ``argv`` with our standard streams; return its exit code as a shell would."""
    tasks = Tasks()
    with_stdin = _stdin_has_input()
    events = processes.start(argv, env=env, cwd=cwd, user=user, stdin=with_stdin, deadline=deadline)
    try:
        async with aclosing(events):
            async for event in events:
                match event:
                    case Started(pid) if with_stdin:
                        tasks.start(_feed(processes, pid), "stdin")
                    case Output(stream, data):
                        _write(sys.stdout.fileno() if stream == "stdout" else 2, data)
                    case Ended():
                        if event.out_of_memory:
                            _say("the sandbox ran out of memory")
                        return exit_code(event)
                    case _:
                        pass
    except UserError as error:
        if error.code != "deadline_exceeded":
            raise
        _say(f"killed after {deadline:g} s")
        return TIMED_OUT
    finally:
        await tasks.close()
    raise GuestError("the command's stream ended without its end", code="guest_protocol")


def _say(text: str) -> None:
    """Beside the command's own words: who reads only these would take it for their fault."""
    print(f"aenv: {text}", file=sys.stderr)


def _stdin_has_input() -> bool:
    """A pipe, file or socket is passed on; a terminal or /dev/null is not."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


async def _feed(processes: Processes, pid: int) -> None:
    import asyncio

    try:
        while data := await asyncio.to_thread(os.read, 0, STDIN_CHUNK):
            await processes.send_stdin(pid, data)
        await processes.close_stdin(pid)
    except (UserError, GuestError):
        return  # the process ended before it read all: not our failure


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
