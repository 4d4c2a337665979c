"""`aenv start`: a sandbox that lives on."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentenv.cli import output
from agentenv.cli.server import Home, Url, ask
from agentenv.errors import UserError
from agentenv.sdk.client import Client

Template = Annotated[str, typer.Argument(help="Template (name, name:tag, id) or image reference")]
User = Annotated[str | None, typer.Option("-u", "--user", help="User in the guest")]
Workdir = Annotated[str | None, typer.Option("-w", "--workdir", help="Folder")]
Env = Annotated[list[str] | None, typer.Option("-e", "--env", help="NAME=value, repeatable")]
Cpus = Annotated[int | None, typer.Option("--cpus", help="Virtual CPUs")]
Memory = Annotated[int | None, typer.Option("--memory", help="MiB")]
Disk = Annotated[int | None, typer.Option("--disk", help="MiB, thin")]
Engine = Annotated[
    str | None, typer.Option("--engine", help="qemu or gvisor [the template's, or the node's]")
]
NoInternet = Annotated[bool, typer.Option("--no-internet", help="Deny all outbound traffic")]


def command(
    template: Template,
    timeout: Annotated[int | None, typer.Option(help="Seconds it lives")] = None,
    env: Env = None,
    metadata: Annotated[
        list[str] | None, typer.Option("-m", "--metadata", help="NAME=value, repeatable")
    ] = None,
    cpus: Cpus = None,
    memory: Memory = None,
    disk: Disk = None,
    engine: Engine = None,
    no_internet: NoInternet = False,
    auto_pause: Annotated[
        bool, typer.Option("--auto-pause", help="Pause it at its deadline, not end it")
    ] = False,
    disk_only: Annotated[
        bool, typer.Option("--disk-only", help="With --auto-pause: pause it without its memory")
    ] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Traffic resumes it where it is paused")
    ] = False,
    home: Home = None,
    url: Url = None,
) -> None:
    """Start a sandbox and print its id.

    Examples: id=$(aenv start base --timeout 3600)    aenv start base --auto-pause --auto-resume
    """
    options = machine(cpus, memory, disk, engine, no_internet)

    async def work(client: Client) -> dict[str, Any]:
        return await client.create(
            template,
            timeout=timeout,
            envVars=pairs("--env", env),
            metadata=pairs("--metadata", metadata),
            auto_pause=auto_pause,
            auto_pause_memory=not disk_only,
            auto_resume=auto_resume,
            **options,
        )

    made = ask(home, url, work)
    output.note(f"template {made['templateID']}, node {made['clientID']}")
    print(made["sandboxID"])


def machine(
    cpus: int | None,
    memory: int | None,
    disk: int | None,
    engine: str | None,
    no_internet: bool,
) -> dict[str, Any]:
    """The options as fields of the create request."""
    return {
        "cpuCount": cpus,
        "memoryMB": memory,
        "diskSizeMB": disk,
        "engine": engine,
        "allow_internet_access": False if no_internet else None,
    }


def pairs(option: str, given: list[str] | None) -> dict[str, str]:
    """``NAME=value`` words as a mapping. Raises UserError for another form."""
    for word in given or []:
        if "=" not in word or word.startswith("="):
            raise UserError(f"{option} {word!r} is not NAME=value")
    return dict(word.split("=", 1) for word in given or [])
