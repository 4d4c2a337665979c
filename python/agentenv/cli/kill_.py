"""`aenv kill`: end sandboxes."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv.cli.server import Home, Url, ask, known_ids, one_by_one
from agentenv.errors import UserError
from agentenv.sdk.client import Client


def command(
    sandbox_ids: Annotated[
        list[str] | None, typer.Argument(help="Sandbox ids", autocompletion=known_ids)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every sandbox")] = False,
    home: Home = None,
    url: Url = None,
) -> None:
    """End sandboxes at once; returns when nothing of them is left.

    Examples: aenv kill a1b2…    aenv kill --all
    """
    if not sandbox_ids and not everything:
        raise UserError("nothing to kill", fix="give sandbox ids, or --all")

    async def work(client: Client) -> None:
        listed = [s["sandboxID"] for s in await client.sandboxes()] if everything else []
        await one_by_one([*(sandbox_ids or []), *listed], client.kill)

    ask(home, url, work)
