"""`aenv template …`: build templates from Dockerfiles, list, tag and remove them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agentenv.cli import output
from agentenv.cli.follow_build import follow_build
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home, Url, ask
from agentenv.cli.start_ import Cpus, Disk, Engine, Memory, pairs
from agentenv.cli.template_init import init
from agentenv.errors import UserError
from agentenv.sdk.client import Client
from agentenv.sdk.templates import Templates

command = typer.Typer(
    no_args_is_help=True,
    help="Build templates, list, tag and remove them.",
    rich_markup_mode="rich",
)
Key = Annotated[str, typer.Argument(help="Template: name, name:tag or id")]
command.command()(init)


@command.command()
def build(
    source: Annotated[Path, typer.Argument(help="Folder with a Dockerfile, or the Dockerfile")],
    name: Annotated[
        str | None, typer.Option("--name", help="NAME[:TAG] [the folder's name]")
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The Dockerfile")] = None,
    tag: Annotated[list[str] | None, typer.Option("-t", "--tag", help="More tags")] = None,
    start: Annotated[
        str | None, typer.Option("--start", help="Started once, runs in every sandbox")
    ] = None,
    start_default: Annotated[
        bool, typer.Option("--start-default", help="Start what ENTRYPOINT and CMD name")
    ] = False,
    ready: Annotated[
        str | None, typer.Option("--ready", help="Succeeds once it is ready [sleep 20]")
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", help="NAME=value for ARG, repeatable")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="Stage to stop after")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do every step again")] = False,
    cpus: Cpus = None,
    memory: Memory = None,
    disk: Disk = None,
    engine: Engine = None,
    home: Home = None,
    url: Url = None,
) -> None:
    """Build a template from a Dockerfile: each step runs in a sandbox and is kept for the next
    build. FROM takes a template's name or an image. Ctrl-C cancels. Exit code 65 if a step fails.

    Example: aenv template build . --name web --start 'python3 -m http.server' --ready 'curl -s
    localhost:8000'
    """
    from agentenv.cli.dockerfile_build import plan

    arguments = pairs("--build-arg", build_arg)
    wanted = plan(source, file, arguments, target)
    for warning in wanted.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if start_default:
        start = start or wanted.dockerfile.command
        if not start:
            raise UserError("the Dockerfile names no command", fix="give --start CMD")
    called = name or _name_of(wanted.context.folder)
    sizes = {"cpuCount": cpus, "memoryMB": memory, "diskSizeMB": disk, "engine": engine}

    async def work(client: Client) -> dict[str, Any]:
        templates = Templates(client)
        made = await templates.request(called, tags=tag, **sizes)
        extra = {"startCmd": start, "readyCmd": ready, "force": no_cache}
        given = {key: value for key, value in extra.items() if value}

        async def recipe() -> dict[str, Any]:
            return {**await wanted.upload(templates, made["templateID"]), **given}

        await follow_build(templates, made, recipe())
        return made

    made = ask(home, url, work)
    if output.interactive():
        print(f"{called}: template {made['templateID']}, build {made['buildID']}")
    else:
        output.dump(made)


def _name_of(folder: Path) -> str:
    name = re.sub(r"[^a-z0-9_-]+", "-", folder.name.lower()).strip("-")
    if not name:
        raise UserError("the folder's name is no template name", fix="give --name NAME")
    return name


@command.command()
def ls(form: Output = Form.AUTO, home: Home = None, url: Url = None) -> None:
    """List templates, newest first. Example: aenv template ls"""

    async def work(client: Client) -> list[dict[str, Any]]:
        return await Templates(client).all()

    found = ask(home, url, work)
    rows = [
        (
            " ".join(each["names"]),
            each["templateID"],
            " ".join(sorted(each["tags"])),
            _size(each),
            each["engine"] or "any",
            each["buildStatus"],
            each["updatedAt"][:16].replace("T", " "),
        )
        for each in found
    ]
    output.table(("NAME", "ID", "TAGS", "SIZE", "ENGINE", "STATUS", "UPDATED"), rows, found, form)


def _size(each: dict[str, Any]) -> str:
    return f"{each['cpuCount']} CPUs, {each['memoryMB']} MiB" if each["cpuCount"] else "at create"


@command.command()
def rm(
    keys: Annotated[list[str], typer.Argument(help="Names, ids; name:tag for one build")],
    home: Home = None,
    url: Url = None,
) -> None:
    """Remove templates; sandboxes made from them live on. Example: aenv template rm web"""

    async def work(client: Client) -> None:
        for key in keys:
            await Templates(client).remove(key)
            print(key)

    ask(home, url, work)


@command.command()
def tag(
    key: Key,
    tags: Annotated[list[str], typer.Argument(help="Tags")],
    remove: Annotated[bool, typer.Option("--remove", help="Take them away")] = False,
    home: Home = None,
    url: Url = None,
) -> None:
    """Let more tags mean what a template's name means now.

    Example: aenv template tag web:v2 live
    """

    async def work(client: Client) -> None:
        templates = Templates(client)
        await (templates.untag(key, tags) if remove else templates.tag(key, tags))

    ask(home, url, work)


@command.command()
def logs(
    key: Key,
    build_id: Annotated[str | None, typer.Option("--build", help="Build [the newest]")] = None,
    home: Home = None,
    url: Url = None,
) -> None:
    """Show the log of a build, and follow it while it runs. Example: aenv template logs web"""

    async def work(client: Client) -> None:
        templates = Templates(client)
        found = await templates.get(key)
        if not found["builds"]:
            raise UserError(f"template {key} has no build")
        wanted = build_id or found["builds"][0]["buildID"]
        async for entry in templates.follow(found["templateID"], wanted):
            print(entry["message"])

    ask(home, url, work)
