"""`aenv shell`: a terminal in a running sandbox."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from typing import Annotated

import typer

from agentenv.cli.server import Home, SandboxId, Url, ask
from agentenv.cli.start_ import Env, User, Workdir, pairs
from agentenv.concurrency import Tasks
from agentenv.errors import GuestError, UserError
from agentenv.sdk.client import Client
from agentenv.sdk.commands import exit_code
from agentenv.sdk.process import Ended, Event, Output, Processes, Started, TerminalSize

KEYS = 32 << 10  # bytes read at once: a paste


def command(
    sandbox_id: SandboxId,
    program: Annotated[str, typer.Option("--shell", help="Program to run")] = "/bin/bash",
    user: User = None,
    workdir: Workdir = None,
    env: Env = None,
    home: Home = None,
    url: Url = None,
) -> None:
    """A login shell in a sandbox, in this terminal; its exit code is ours.

    Keys go to the sandbox, Ctrl-C too; the size follows this terminal's.

    Example: aenv shell a1b2…
    """
    if not sys.stdin.isatty():
        raise UserError("standard input is no terminal", fix="use: aenv exec", code="no_terminal")

    async def work(client: Client) -> int:
        processes = Processes(client, await client.sandbox(sandbox_id))
        events = processes.start(
            (program, "-i", "-l"),
            env={"TERM": os.environ.get("TERM", "xterm-256color"), **pairs("--env", env)},
            cwd=workdir,
            user=user,
            terminal=size(),
        )
        with raw_keys():
            return await _follow(processes, events)

    raise typer.Exit(ask(home, url, work))


def size() -> TerminalSize:
    found = os.get_terminal_size(0)
    return TerminalSize(found.columns, found.lines)


@contextmanager
def raw_keys() -> Generator[None]:
    """Every key as it is, none meant for us; the terminal's mode is given back in any case."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # keys typed ahead are kept
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)


async def _follow(processes: Processes, events: AsyncGenerator[Event, None]) -> int:
    tasks, loop = Tasks(), asyncio.get_running_loop()
    keys: asyncio.Queue[bytes] = asyncio.Queue()
    loop.add_reader(0, lambda: keys.put_nowait(os.read(0, KEYS)))
    try:
        async with aclosing(events):
            async for event in events:
                match event:
                    case Started(pid):
                        tasks.start(_type(processes, pid, keys), "keys")
                        loop.add_signal_handler(
                            signal.SIGWINCH,
                            lambda pid=pid: tasks.start(processes.resize(pid, size()), "resize"),
                        )
                    case Output(_, data):
                        os.write(1, data)
                    case Ended():
                        return exit_code(event)
    finally:
        loop.remove_reader(0)
        loop.remove_signal_handler(signal.SIGWINCH)
        await tasks.close()
    raise GuestError("the shell's stream ended without its end", code="guest_protocol")


async def _type(processes: Processes, pid: int, keys: asyncio.Queue[bytes]) -> None:
    """Pass keys on in order, as many at once as have gathered."""
    while data := await keys.get():
        while not keys.empty():
            data += keys.get_nowait()
        await processes.send_keys(pid, data)
