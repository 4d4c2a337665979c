"""`aenv fork`: copies of a running sandbox."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentenv.cli.server import Home, SandboxId, Url, ask
from agentenv.errors import AgentEnvError
from agentenv.sdk.client import Client


def command(
    sandbox_id: SandboxId,
    count: Annotated[int, typer.Option("-n", "--count", min=1, max=100, help="Copies")] = 1,
    timeout: Annotated[int | None, typer.Option(help="Seconds they live [300]")] = None,
    home: Home = None,
    url: Url = None,
) -> None:
    """Copy a running sandbox, which goes on: memory, disk and processes as they are now, ids and
    randomness of their own. Prints the copies' ids, one a line; what failed is told at the end.

    Example: for id in $(aenv fork a1b2… -n 4); do aenv exec $id -- ./attempt; done
    """

    async def work(client: Client) -> list[dict[str, Any] | AgentEnvError]:
        return await client.fork(sandbox_id, count, timeout)

    failures: list[AgentEnvError] = []
    for made in ask(home, url, work):
        if isinstance(made, AgentEnvError):
            failures.append(made)
        else:
            print(made["sandboxID"])
    if failures:
        raise failures[0]
