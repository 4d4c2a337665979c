"""`aenv rollback`: a running sandbox goes back."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv.cli.server import Home, SandboxId, Url, ask
from agentenv.sdk.client import Client


def command(
    sandbox_id: SandboxId,
    snapshot: Annotated[
        str | None,
        typer.Argument(help="A snapshot of it, or of one it came from [the last, or its origin]"),
    ] = None,
    home: Home = None,
    url: Url = None,
) -> None:
    """Put a running sandbox back to a snapshot: memory, disk and processes as they were then; its
    id, tokens and deadline stay. If it cannot be restored, it runs on as it is.

    Examples: aenv rollback a1b2…    aenv rollback a1b2… tests:green
    """

    async def work(client: Client) -> str:
        return str((await client.rollback(sandbox_id, snapshot))["sandboxID"])

    print(ask(home, url, work))
