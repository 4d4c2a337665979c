"""`aenv image …`: the images of this machine, with or without a running server."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from agentenv import config
from agentenv.cli import output
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home, run
from agentenv.errors import Conflict, InfraError, NotFound
from agentenv.image.source import Report
from agentenv.store.records import DEFAULT_TAG

command = typer.Typer(
    no_args_is_help=True, help="Pull, list, verify and remove images.", rich_markup_mode="rich"
)
Key = Annotated[str, typer.Argument(help="Image id, reference or template name")]


@command.command()
def pull(
    source: Annotated[str, typer.Argument(help="What to pull")],
    name: Annotated[str | None, typer.Option("--name", help="Name it as a template")] = None,
    home: Home = None,
) -> None:
    """Bring an image onto this machine; layers that are here already are not fetched.

    Sources: [HOST/]NAME[:TAG][@DIGEST] (a registry), oci:DIR[:TAG], oci-archive:FILE,
    docker-archive:FILE[:NAME:TAG] (of `docker save`), tar:FILE, dir:DIR,
    debootstrap:SUITE[+PKG,PKG…] (from Debian packages: no registry needed), store:ID (in the
    store already: nothing is converted or downloaded).

    Examples: aenv image pull debian:bookworm
    aenv image pull debootstrap:bookworm+python3,procps --name base
    """

    async def work() -> dict[str, Any]:
        from agentenv.node.library import open_library
        from agentenv.template.named import name_image
        from agentenv.template.names import check

        if name is not None:
            check(name)  # before minutes are spent
        async with open_library(config.load({"home": home})) as library:
            with progress() as report:
                image = await library.catalog.pull(source, report)
            with suppress(InfraError):  # no server runs
                await library.blocks.rescan()
            if name is not None:
                await name_image(library.records, image.id, name)
            return {**asdict(image), "name": name}

    done = run(work())
    if output.interactive():
        named = f" as {name}" if name else ""
        print(f"{done['reference']}{named}: {done['id']}, {done['size'] / 1e6:.0f} MB")
    else:
        output.dump(done)


@contextmanager
def progress() -> Generator[Report]:
    """Bars on a terminal; one JSON line per finished layer on stderr when piped."""
    if not output.interactive():
        yield _report_lines
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
    )  # fmt: skip
    with Progress(*columns, transient=True) as bars:
        known: dict[tuple[str, str], Any] = {}
        guard = threading.Lock()  # conversions report from their threads

        def report(digest: str, stage: str, done: int, total: int) -> None:
            with guard:
                key = (digest, "convert" if stage == "done" else stage)
                if key not in known:
                    known[key] = bars.add_task(f"{digest[7:19]} {key[1]}", total=total or None)
                bars.update(known[key], completed=done)

        yield report


def _report_lines(digest: str, stage: str, _done: int, total: int) -> None:
    if stage in ("done", "exists"):
        import sys

        print(json.dumps({"layer": digest, "state": stage, "size": total}), file=sys.stderr)


@command.command()
def ls(
    store: Annotated[bool, typer.Option("--store", help="All in the store, of any node")] = False,
    form: Output = Form.AUTO,
    home: Home = None,
) -> None:
    """List images, newest first. Example: aenv image ls"""

    async def work() -> list[dict[str, Any]]:
        from agentenv.node.library import open_library

        async with open_library(config.load({"home": home})) as library:
            names = await _names(library.records)
            catalog = library.catalog
            images = await (catalog.stored() if store else catalog.list())
            return [{**asdict(i), "names": names.get(i.id, [])} for i in images]

    found = run(work())
    rows = [
        (i["id"], i["reference"], " ".join(i["names"]), f"{i['size'] / 1e6:.0f} MB",
         f"{i['created']:%Y-%m-%d %H:%M}") for i in found
    ]  # fmt: skip
    output.table(("ID", "REFERENCE", "TEMPLATES", "SIZE", "PULLED"), rows, found, form)


async def _names(records: Any) -> dict[str, list[str]]:
    """Image id to the template names (with tag) that mean it."""
    from agentenv.template.named import called

    names: dict[str, list[str]] = {}
    for template in await records.templates():
        for tag, build_id in template.tags.items():
            build = await records.build(build_id)
            if build and build.image_id:
                shown = called(template) + ("" if tag == DEFAULT_TAG else f":{tag}")
                names.setdefault(build.image_id, []).append(shown)
    return names


async def _image_id(records: Any, key: str) -> str:
    """What a template name means, else the key itself."""
    from agentenv.template.named import find_build

    found = await find_build(records, key)
    return (found[1].image_id or key) if found else key


async def _refuse_if_used(records: Any, image_id: str) -> None:
    """Before a template goes: its image's sandboxes would keep the image and lose the name."""
    for row in await records.sandboxes():
        if row.image_id == image_id and row.state != "ended":
            raise Conflict(
                f"image {image_id} is in use by sandbox {row.id}",
                fix=f"end it first: aenv kill {row.id}",
                code="image_in_use",
            )


@command.command()
def inspect(key: Key, home: Home = None) -> None:
    """Show an image's configuration and layers. Example: aenv image inspect base"""

    async def work() -> dict[str, Any]:
        from agentenv.node.library import open_library

        async with open_library(config.load({"home": home})) as library:
            key_id = await _image_id(library.records, key)
            return asdict(await library.catalog.find(key_id))

    output.dump(run(work()))


@command.command()
def verify(key: Key, home: Home = None) -> None:
    """Compare the mounted image, entry by entry, with what was pulled, and that with its source.

    Needs root, and room for a copy of the image. Exit code 65 on a difference.
    Example: aenv image verify base
    """

    async def work() -> dict[str, Any]:
        from agentenv.layer.verify import verify as compare
        from agentenv.node.library import open_library

        async with open_library(config.load({"home": home})) as library:
            catalog = library.catalog
            image = await catalog.find(await _image_id(library.records, key))
            return asdict(await compare(library.layers, image, catalog.settings))

    verdict = run(work())
    if output.interactive():
        for d in verdict["differences"]:
            print(f"{d['path']}: {d['what']} is {d['found']}, not {d['expected']}")
        print(f"{verdict['entries']} entries compared; source: {verdict['source']}")
    else:
        output.dump(verdict)
    raise typer.Exit(65 if verdict["differences"] else 0)


@command.command()
def rm(
    keys: Annotated[list[str], typer.Argument(help="Ids, references, names")], home: Home = None
) -> None:
    """Remove images, and what only they need. A template's name removes the template first.

    Example: aenv image rm base
    """

    async def work() -> None:
        from agentenv.node.library import open_library
        from agentenv.template.named import find_build

        async with open_library(config.load({"home": home})) as library:
            records, catalog = library.records, library.catalog
            for key in keys:
                named = await find_build(records, key)
                image_id = named[1].image_id if named else None
                image_id = image_id or (await catalog.find(key)).id
                await _refuse_if_used(records, image_id)
                if named:
                    await records.drop_template(named[0].id)
                try:
                    await catalog.remove(image_id)
                except NotFound:
                    continue
                print(image_id)

    run(work())
