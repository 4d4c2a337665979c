"""`aenv doctor`: does this machine have what AgentENV needs, and what would mend it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import typer

from agentenv import config
from agentenv.cli import output
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home


def command(form: Output = Form.AUTO, home: Home = None) -> None:
    """Check every host fact that matters, with a verdict and a remedy each. Exit code 1 on a fail.

    KVM is probed by booting the guest kernel, which takes a few seconds the first time.

    Example: aenv doctor
    """
    from agentenv.node.assembly import examine_host

    found = asyncio.run(examine_host(config.load({"home": home})))
    rows = [(f.verdict, f.name, f.found, f.remedy) for f in found]
    output.table(("VERDICT", "FACT", "FOUND", "REMEDY"), rows, [asdict(f) for f in found], form)
    raise typer.Exit(1 if any(f.verdict == "fail" for f in found) else 0)
