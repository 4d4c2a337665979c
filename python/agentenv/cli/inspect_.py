"""`aenv inspect`: everything known of a sandbox, each host object of it included."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv.cli import output
from agentenv.cli.server import Home, Url, ask


def command(
    sandbox_id: Annotated[str, typer.Argument(help="Sandbox id")],
    home: Home = None,
    url: Url = None,
) -> None:
    """Show a sandbox: state, sizes, times of its creation by phase, pid, netns, tap, files.

    For one that ended within the last hour it shows why. Example: aenv inspect a1b2…
    """
    output.dump(ask(home, url, lambda client: client.inspect(sandbox_id)))
