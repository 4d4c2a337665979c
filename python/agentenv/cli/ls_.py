"""`aenv ls`: the sandboxes that run."""

from __future__ import annotations

from agentenv.cli import output
from agentenv.cli.server import Home, Url, ask


def command(home: Home = None, url: Url = None) -> None:
    """List sandboxes, newest first.

    Examples: aenv ls    aenv ls | jq -r '.[].sandboxID'
    """
    found = ask(home, url, lambda client: client.sandboxes())
    columns = ("ID", "TEMPLATE", "STATE", "CPUS", "MIB", "STARTED", "ENDS")
    rows = [
        (
            s["sandboxID"], s.get("alias") or s["templateID"], s["state"], s["cpuCount"],
            s["memoryMB"], s["startedAt"][:19], s["endAt"][:19],
        )
        for s in found
    ]  # fmt: skip
    output.table(columns, rows, found)
