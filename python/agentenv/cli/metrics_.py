"""`aenv metrics`: what a sandbox uses."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentenv.cli import output
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home, SandboxId, Url, ask

MIB = 1 << 20


def command(
    sandbox_id: SandboxId,
    last: Annotated[int, typer.Option("-n", "--last", min=1, help="How many samples")] = 6,
    form: Output = Form.AUTO,
    home: Home = None,
    url: Url = None,
) -> None:
    """Show samples of CPU, memory and disk, oldest first: one every 10 seconds, for an hour.

    A sandbox that ended lately has its last ones. Example: aenv metrics a1b2… -n 60 -o json
    """
    found = ask(home, url, lambda client: client.metrics(sandbox_id))[-last:]
    columns = ("TIME", "CPU %", "CPUS", "MEMORY MIB", "OF", "CACHE MIB", "DISK MIB", "OF")
    output.table(columns, [_row(sample) for sample in found], found, form)


def _row(sample: dict[str, Any]) -> tuple[object, ...]:
    sizes = ("memUsed", "memTotal", "memCache", "diskUsed", "diskTotal")
    time = sample["timestamp"][:19]
    return time, sample["cpuUsedPct"], sample["cpuCount"], *(sample[n] // MIB for n in sizes)
