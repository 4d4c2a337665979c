"""`aenv template init`: the templates that come with AgentENV, made on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentenv import config
from agentenv.cli import output
from agentenv.cli.follow_build import follow_build
from agentenv.cli.image_ import progress
from agentenv.cli.server import Home, Url, ask
from agentenv.cli.start_ import Engine
from agentenv.errors import InfraError
from agentenv.sdk.client import Client
from agentenv.sdk.templates import Templates

if TYPE_CHECKING:
    from agentenv.template.shipped.recipes import Shipped


def init(
    names: Annotated[
        list[str] | None, typer.Argument(help="base, code-interpreter-v1 [both]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start and snapshot them again")] = False,
    engine: Engine = None,
    home: Home = None,
    url: Url = None,
) -> None:
    """Make the templates that E2B's SDKs ask for: base, and code-interpreter-v1, which needs base.

    Their images are assembled on this machine from Debian packages and wheels, then started in a
    sandbox each. What is there already is not made again. A server must run on --home.

    Example: aenv template init
    """
    from agentenv.template.shipped.recipes import needed

    wanted = needed(names or ())

    async def work(client: Client) -> list[dict[str, Any]]:
        templates = Templates(client)
        await templates.all()  # before minutes are spent: does a server answer
        images = await _images(wanted, home)
        return [await _build(templates, each, images[each.name], engine, force) for each in wanted]

    made = ask(home, url, work)
    if not output.interactive():
        output.dump(made)
        return
    for each in made:
        print(f"{each['name']}: template {each['templateID']}, {each['size'] / 1e6:.0f} MB")


async def _images(wanted: list[Shipped], home: Path | None) -> dict[str, dict[str, Any]]:
    """The image of each, by its template's name."""
    from agentenv.node.library import open_library
    from agentenv.template.shipped import assemble

    images: dict[str, dict[str, Any]] = {}
    async with open_library(config.load({"home": home})) as library:
        for each in wanted:
            print(f"assembling the image of {each.name}", file=sys.stderr)
            with progress() as report:
                images[each.name] = asdict(await assemble.image(library.catalog, each, report))
        with suppress(InfraError):
            await library.blocks.rescan()
    return images


async def _build(
    templates: Templates,
    shipped: Shipped,
    image: Mapping[str, Any],
    engine: str | None,
    force: bool,
) -> dict[str, Any]:
    made = await templates.request(shipped.name, memoryMB=shipped.memory_mib, engine=engine)

    async def recipe() -> dict[str, Any]:
        commands = {"startCmd": shipped.start, "readyCmd": shipped.ready}
        given = {name: command for name, command in commands.items() if command}
        return {"fromImage": image["reference"], "force": force, **given}

    await follow_build(templates, made, recipe())
    return {"name": shipped.name, **made, "imageID": image["id"], "size": image["size"]}
