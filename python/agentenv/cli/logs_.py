"""`aenv logs`: the console of a sandbox."""

from __future__ import annotations

from typing import Annotated

import typer

from agentenv.cli.server import Home, SandboxId, Url, ask


def command(
    sandbox_id: SandboxId,
    lines: Annotated[int, typer.Option("-n", "--lines", help="How many, from the end")] = 200,
    home: Home = None,
    url: Url = None,
) -> None:
    """Print the last lines of a sandbox's console (kernel and agent).

    Example: aenv logs a1b2… -n 20
    """
    for line in ask(home, url, lambda client: client.console(sandbox_id, lines)):
        print(line)
