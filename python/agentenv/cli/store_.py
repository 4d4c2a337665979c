"""`aenv store …`: what the block store holds, whether it is whole, what can go."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from agentenv import config
from agentenv.cli import output
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home, run

command = typer.Typer(
    no_args_is_help=True, help="Look at, verify and clean the block store.", rich_markup_mode="rich"
)
DryRun = Annotated[bool, typer.Option("--dry-run", help="Tell what would go, change nothing")]
# What a person is shown of the statistics, with what it means.
SHOWN = {
    "images": "images that somebody claims",
    "logical_bytes": "what they would take unshared and uncompressed",
    "unique_bytes": "of it, content that is there once",
    "stored_bytes": "what the store takes",
    "saved_bytes": "saved by sharing and compression",
    "cache_bytes": "kept on this machine",
    "cache_hits": "reads answered from this machine",
    "cache_misses": "reads that waited for the store",
    "fetched_bytes": "read from the store since the block server's start",
    "peer_bytes": "read from other nodes",
}


@command.command()
def stats(
    form: Output = Form.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="As --output json")] = False,
    home: Home = None,
) -> None:
    """Show what the store holds, what sharing saves, and how the cache does.

    The cache's figures are those of the running server. Example: aenv store stats
    """

    async def work() -> dict[str, Any]:
        from agentenv.node.library import open_library
        from agentenv.store.statistics import cache_statistics, store_statistics

        effective = config.load({"home": home})
        async with open_library(effective) as library:
            found = await store_statistics(library.layers.objects, library.collection)
            cache = await cache_statistics(library.blocks, effective.home / "cache")
        return {**asdict(found), **cache}

    found = run(work())
    rows = [(name, f"{found[name]:,}", meaning) for name, meaning in SHOWN.items()]
    output.table(("FIGURE", "VALUE", "MEANING"), rows, found, Form.JSON if as_json else form)


@command.command()
def verify(
    discard: Annotated[bool, typer.Option("--discard", help="Remove what is damaged")] = False,
    home: Home = None,
) -> None:
    """Read everything that is claimed, and check every byte against its name.

    What is removed by --discard is made again when the images that need it are pulled again.
    Exit code 65 if something is damaged or missing. Example: aenv store verify
    """

    async def work() -> dict[str, Any]:
        from agentenv.node.library import open_library
        from agentenv.store.statistics import verify_store

        async with open_library(config.load({"home": home})) as library:
            done = await verify_store(library.layers.objects)
            if discard:
                hurt = sorted({fault.discard for fault in done.faults if fault.discard})
                await library.layers.discard(hurt)
            return asdict(done)

    found = run(work())
    if output.interactive():
        for fault in found["faults"]:
            print(f"{fault['key']}: {fault['why']} (needed by {', '.join(fault['needed_by'])})")
        if discard and found["faults"]:
            print("removed what is damaged; pull the images that need it again")
        print(f"{found['layers']} layers, {found['chunks']} chunks, {len(found['faults'])} faults")
    else:
        output.dump(found)
    raise typer.Exit(65 if found["faults"] else 0)


@command.command()
def gc(dry_run: DryRun = False, home: Home = None) -> None:
    """Delete what no image of any home on this store needs; compact packs that are mostly dead.

    Safe beside pulls and running sandboxes, and when it is killed. Example: aenv store gc --dry-run
    """

    async def work() -> dict[str, Any]:
        from agentenv.node.library import open_library

        async with open_library(config.load({"home": home})) as library:
            if not dry_run:
                await library.catalog.sweep()
            return asdict(await library.collection.run(dry=dry_run))

    found = run(work())
    if output.interactive():
        would = "would be " if dry_run else ""
        for key in found["deleted"]:
            print(key)
        size = found["deleted_bytes"] / 1e6
        print(f"{len(found['deleted'])} objects, {size:.1f} MB {would}deleted")
    else:
        output.dump(found)
