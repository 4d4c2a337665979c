"""How verbs find the server: options shared by all of them, and the client they open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from agentenv import config
from agentenv.errors import AgentEnvError
from agentenv.sdk.client import Address, Client

T = TypeVar("T")


def known_ids(incomplete: str) -> list[str]:
    """For completion: ids that begin so, none where no server answers."""
    try:
        found = ask(None, None, lambda client: client.sandboxes())
    except AgentEnvError:
        return []
    return [s["sandboxID"] for s in found if s["sandboxID"].startswith(incomplete)]


SandboxId = Annotated[str, typer.Argument(help="Sandbox id", autocompletion=known_ids)]
SandboxIds = Annotated[list[str], typer.Argument(help="Sandbox ids", autocompletion=known_ids)]
Home = Annotated[
    Path | None, typer.Option("--home", help="Home of the server [$AENV_HOME or /var/lib/agentenv]")
]
Url = Annotated[str | None, typer.Option("--url", help="Server to talk to [$AENV_URL]")]


def address(home: Path | None, url: str | None) -> Address:
    effective = config.load({"home": home})
    return Address.find(url, effective.home, effective.listen, effective.scheme)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine; Ctrl-C cancels it and lets it clean up."""
    return asyncio.run(work)


def ask(home: Path | None, url: str | None, work: Callable[[Client], Awaitable[T]]) -> T:
    """Open a client, do ``work``, close it."""

    async def session() -> T:
        async with Client(address(home, url)) as client:
            return await work(client)

    return run(session())


async def one_by_one(ids: Iterable[str], work: Callable[[str], Awaitable[object]]) -> None:
    """Do ``work`` with each and print its id; one that fails does not stop those after it.

    Raises the first failure.
    """
    failures: list[AgentEnvError] = []
    for each_id in ids:
        try:
            await work(each_id)
            print(each_id)
        except AgentEnvError as error:
            failures.append(error)
    if failures:
        raise failures[0]
