"""`aenv inspect`: everything known of a sandbox, each host object of it included."""

from __future__ import annotations

from agentenv.cli import output
from agentenv.cli.server import Home, SandboxId, Url, ask


def command(
    sandbox_id: SandboxId,
    home: Home = None,
    url: Url = None,
) -> None:
    """Show a sandbox: state, sizes, times of its creation by phase, pid, netns, tap, files.

    For one that ended within the last hour it shows why. Example: aenv inspect a1b2…
    """
    output.dump(ask(home, url, lambda client: client.inspect(sandbox_id)))
