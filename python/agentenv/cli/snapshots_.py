"""`aenv snapshots`: what was saved of sandboxes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentenv.cli import output
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home, Url, ask, known_ids, one_by_one
from agentenv.sdk.client import Client
from agentenv.sdk.templates import Templates

command = typer.Typer(rich_markup_mode="rich")


@command.callback(invoke_without_command=True)
def ls(
    context: typer.Context,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", help="Only of this one", autocompletion=known_ids)
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only of this NAME[:TAG]")] = None,
    form: Output = Form.AUTO,
    home: Home = None,
    url: Url = None,
) -> None:
    """List snapshots of sandboxes, newest first, or remove some.

    Examples: aenv snapshots --sandbox a1b2…    aenv snapshots rm tests:green
    """
    if context.invoked_subcommand:
        return

    async def work(client: Client) -> list[dict[str, Any]]:
        return await client.snapshots(sandbox, name)

    found = ask(home, url, work)
    rows = [
        (each["snapshotID"], each["sandboxID"], each["createdAt"][:19].replace("T", " "))
        for each in found
    ]
    output.table(("ID", "SANDBOX", "MADE"), rows, found, form)


@command.command()
def rm(
    ids: Annotated[list[str], typer.Argument(help="Ids, as `aenv snapshots` shows them")],
    home: Home = None,
    url: Url = None,
) -> None:
    """Remove snapshots; sandboxes made from them live on. Example: aenv snapshots rm tests:green"""

    async def work(client: Client) -> None:
        await one_by_one(ids, Templates(client).remove)

    ask(home, url, work)
