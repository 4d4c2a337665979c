"""`aenv port`: a port of a sandbox on this machine's loopback."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from agentenv.cli import output
from agentenv.cli.server import Home, SandboxId, Url, ask
from agentenv.errors import UserError
from agentenv.sdk.client import Client
from agentenv.sdk.sandbox import Sandbox

MAX_PORT = 65535


def command(
    sandbox_id: SandboxId,
    port: Annotated[str, typer.Argument(metavar="[LOCAL:]PORT", help="Port in the sandbox")],
    address: Annotated[str, typer.Option(help="Where to listen here")] = "127.0.0.1",
    home: Home = None,
    url: Url = None,
) -> None:
    """Forward a local port to a port of the sandbox, any protocol, until Ctrl-C.

    It reaches servers that listen on the sandbox's loopback only, too. LOCAL is PORT unless given;
    0 takes any free one. The first line printed is where it listens.

    Examples: aenv port a1b2… 5432    aenv port a1b2… 8080:80
    """
    local, remote = ports(port)

    async def work(client: Client) -> None:
        sandbox = Sandbox(client, await client.sandbox(sandbox_id))
        try:
            async with sandbox.ports.forward(remote, local=local, address=address) as bound:
                print(f"{bound[0]}:{bound[1]}", flush=True)
                output.note(f"forwarding to port {remote} of {sandbox_id}; Ctrl-C ends it")
                await asyncio.Event().wait()
        except OSError as error:
            raise UserError(
                f"cannot listen on {address}:{local}",
                why=str(error),
                fix="give another local port: LOCAL:PORT",
                code="port_taken",
            ) from error

    ask(home, url, work)


def ports(text: str) -> tuple[int, int]:
    """The local and the sandbox's port. Raises UserError."""
    local, _, remote = text.rpartition(":")
    numbers = [int(part) if part.isdigit() else -1 for part in (local or remote, remote)]
    if not 0 <= numbers[0] <= MAX_PORT or not 0 < numbers[1] <= MAX_PORT:
        raise UserError(f"{text!r} is no port", fix="give PORT or LOCAL:PORT, from 1 to 65535")
    return numbers[0], numbers[1]
