"""`aenv resume`: have paused sandboxes run again."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv.cli.server import Home, SandboxIds, Url, ask, one_by_one
from agentenv.sdk.client import Client


def command(
    sandbox_ids: SandboxIds,
    timeout: Annotated[
        int | None, typer.Option(help="Seconds it lives from now on [as long as before]")
    ] = None,
    disk_only: Annotated[
        bool, typer.Option("--disk-only", help="Boot it from its disk, whatever else was kept")
    ] = False,
    home: Home = None,
    url: Url = None,
) -> None:
    """Resume paused sandboxes where they stood; one that runs already is left to run.

    Examples: aenv resume a1b2…    aenv resume a1b2… --timeout 3600
    """

    async def work(client: Client) -> None:
        await one_by_one(
            sandbox_ids, lambda one: client.connect(one, timeout, memory=not disk_only)
        )

    ask(home, url, work)
