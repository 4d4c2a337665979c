"""`aenv ls`: the sandboxes that run or are paused."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from agentenv.cli import output
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home, Url, ask
from agentenv.cli.start_ import pairs


def command(
    template: Annotated[str | None, typer.Option(help="Only those of this template")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option("-m", "--metadata", help="Only those with NAME=value")
    ] = None,
    state: Annotated[str | None, typer.Option(help="running, paused, or both")] = None,
    since: Annotated[str | None, typer.Option(help="Started at this time (ISO) or later")] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only ids, one a line")] = False,
    form: Output = Form.AUTO,
    home: Home = None,
    url: Url = None,
) -> None:
    """List sandboxes that run or are paused, newest first.

    Examples: aenv ls --state paused    aenv ls -m run=17    aenv kill $(aenv ls -q --template base)
    """
    given = {
        "template": template,
        "state": state,
        "startedAfter": since,
        "metadata": filter_of(pairs("--metadata", metadata)),
    }
    filters = {name: value for name, value in given.items() if value}
    found = ask(home, url, lambda client: client.sandboxes(**filters))
    if quiet:
        for sandbox in found:
            print(sandbox["sandboxID"])
        return
    columns = ("ID", "TEMPLATE", "STATE", "CPUS", "MIB", "STARTED", "ENDS")
    rows = [
        (
            s["sandboxID"], s.get("alias") or s["templateID"], s["state"], s["cpuCount"],
            s["memoryMB"], s["startedAt"][:19], s["endAt"][:19],
        )
        for s in found
    ]  # fmt: skip
    output.table(columns, rows, found, form)


def filter_of(wanted: dict[str, str]) -> str:
    """Each part is encoded once more than the query itself (E2B.md §1.1)."""
    return urlencode({quote(name): quote(value) for name, value in wanted.items()})
