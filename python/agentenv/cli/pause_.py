"""`aenv pause`: keep sandboxes, and nothing that runs."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv.cli.server import Home, SandboxIds, Url, ask, one_by_one
from agentenv.sdk.client import Client


def command(
    sandbox_ids: SandboxIds,
    disk_only: Annotated[
        bool, typer.Option("--disk-only", help="Without memory: it is booted when it comes back")
    ] = False,
    home: Home = None,
    url: Url = None,
) -> None:
    """Pause sandboxes: memory, disk and processes are kept, no memory or CPU is used. `aenv resume`
    brings them back; so does traffic, if they were made with --auto-resume.

    Examples: aenv pause a1b2…    aenv pause $(aenv ls -q --state running)
    """

    async def work(client: Client) -> None:
        await one_by_one(sandbox_ids, lambda one: client.pause(one, memory=not disk_only))

    ask(home, url, work)
