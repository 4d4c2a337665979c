"""`aenv snapshot`: save a sandbox that goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv.cli.server import Home, SandboxId, Url, ask
from agentenv.sdk.client import Client


def command(
    sandbox_id: SandboxId,
    name: Annotated[str | None, typer.Option("--name", help="NAME[:TAG] [none]")] = None,
    disk_only: Annotated[
        bool, typer.Option("--disk-only", help="Without memory: sandboxes made of it are booted")
    ] = False,
    home: Home = None,
    url: Url = None,
) -> None:
    """Save a running sandbox, which goes on, and print what sandboxes can be started from.

    Examples: aenv snapshot a1b2… --name tests:green    aenv start $(aenv snapshot a1b2…)
    """

    async def work(client: Client) -> str:
        made = await client.snapshot(sandbox_id, name, memory=not disk_only)
        return str(made["snapshotID"])

    print(ask(home, url, work))
