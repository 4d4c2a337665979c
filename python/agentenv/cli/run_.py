"""`aenv run`: a sandbox for one command."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv.cli import output
from agentenv.cli.exec_ import OPTIONS, run_process
from agentenv.cli.server import Home, Url, ask
from agentenv.cli.start_ import (
    Cpus,
    Disk,
    Engine,
    Env,
    Memory,
    NoInternet,
    Template,
    User,
    Workdir,
    machine,
    pairs,
)
from agentenv.errors import UserError
from agentenv.sdk.client import Client
from agentenv.sdk.process import Processes

__all__ = ["OPTIONS", "command"]


def command(
    template: Template,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND...]", help="Default: the image's")
    ] = None,
    timeout: Annotated[int, typer.Option(help="Seconds it may live")] = 3600,
    user: User = None,
    workdir: Workdir = None,
    entrypoint: Annotated[
        str | None, typer.Option(help="Replaces the image's; empty: none")
    ] = None,
    env: Env = None,
    cpus: Cpus = None,
    memory: Memory = None,
    disk: Disk = None,
    engine: Engine = None,
    no_internet: NoInternet = False,
    home: Home = None,
    url: Url = None,
) -> None:
    """Make a sandbox, run a command in it, end it. As with `docker run`, the command follows the
    image's entrypoint and replaces its default command; the exit code is passed on.

    Examples: aenv run base -- python3 -c 'print(6*7)'    aenv run debian:bookworm -- ls /
    """

    async def work(client: Client) -> int:
        made = await client.create(
            template, timeout=timeout, **machine(cpus, memory, disk, engine, no_internet)
        )
        sandbox_id = made["sandboxID"]
        output.note(f"sandbox {sandbox_id}")
        try:
            image = (await client.inspect(sandbox_id))["image"]
            argv = compose(image, tuple(words or ()), entrypoint)
            return await run_process(
                Processes(client, made), argv, env=pairs("--env", env), cwd=workdir, user=user
            )
        finally:
            await client.kill(sandbox_id)

    raise typer.Exit(ask(home, url, work))


def compose(
    image: dict[str, list[str]], words: tuple[str, ...], entrypoint: str | None
) -> tuple[str, ...]:
    """The program and its arguments by Docker's rules. Raises UserError if there is none."""
    first = image["entrypoint"] if entrypoint is None else [entrypoint] if entrypoint else []
    # An entrypoint given anew resets the image's default command.
    rest = words or (tuple(image["cmd"]) if entrypoint is None else ())
    argv = (*first, *rest)
    if not argv:
        raise UserError("the image names no command", fix="give one after `--`", code="no_command")
    return argv
