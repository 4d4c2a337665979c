"""`aenv diff`: the files in which two sandboxes or snapshots differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from agentenv.cli import output
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home, Url, ask, known_ids
from agentenv.sdk.client import Client
from agentenv.sdk.diff import Difference, diff

KEY = "A sandbox, snapshot or template"


def command(
    one: Annotated[str, typer.Argument(metavar="A", help=KEY, autocompletion=known_ids)],
    other: Annotated[
        str | None,
        typer.Argument(metavar="B", help=f"{KEY} [A against its image]", autocompletion=known_ids),
    ] = None,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Compare contents, not sizes and times.")
    ] = False,
    form: Output = Form.AUTO,
    home: Home = None,
    url: Url = None,
) -> None:
    """Show the files on disk that were added (A), modified (M) or deleted (D) from A to B. Both
    must be made from one image. Into what is paused, or a snapshot, a sandbox made of it looks.

    Examples: aenv diff a1b2…    aenv diff a1b2… c3d4…    aenv diff tests:green a1b2…
    """

    async def work(client: Client) -> Sequence[Difference]:
        return await diff(client, one, other, checksum=checksum)

    found = ask(home, url, work)
    if output.as_json(form):
        output.dump([asdict(each) for each in found])
    else:
        for each in found:
            print(each.change, printable(each.path))


def printable(path: str) -> str:
    """On one line, whatever the name holds."""
    return path if path.isprintable() else path.encode("unicode_escape").decode()
