"""`aenv cp`: files and trees into a sandbox and out of it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from agentenv.cli.server import Home, Url, ask
from agentenv.cli.start_ import User
from agentenv.errors import NotFound, UserError
from agentenv.sdk.client import Client
from agentenv.sdk.sandbox import Sandbox

ID_LENGTH = 20


def command(
    words: Annotated[
        list[str], typer.Argument(metavar="SOURCE... TARGET", help="ID:PATH is in a sandbox")
    ],
    user: User = None,
    special: Annotated[
        bool, typer.Option("--special", help="Out of a sandbox: setuid bits and devices, too")
    ] = False,
    home: Home = None,
    url: Url = None,
) -> None:
    """Copy files and folders as tar would: modes, owners, times, links and holes are kept.

    Into a target that is a folder they go under their own names, else under the target's. With
    --user all that comes into the sandbox is that user's. On this machine owners are kept where
    you may set them.

    Examples: aenv cp -u user ./src a1b2…:/home/user/    aenv cp a1b2…:/var/log/app ./logs
    """
    if len(words) < 2:
        raise UserError("cp needs a source and a target", fix="aenv cp SOURCE... TARGET")
    *sources, target = (split(word) for word in words)
    from_id, into_id = sources[0][0], target[0]
    if any(source[0] != from_id for source in sources) or (from_id is None) == (into_id is None):
        raise UserError(
            "one side must be in a sandbox and the other on this machine",
            fix="name the first ID:PATH",
        )
    many = len(sources) > 1

    async def work(client: Client) -> None:
        sandbox = Sandbox(client, await client.sandbox(str(into_id or from_id)))
        for _, path in sources:
            if into_id:
                await _into(sandbox, Path(path), target[1], many, user)
            else:
                await _out(sandbox, path, Path(target[1]), many, special)

    ask(home, url, work)


def split(word: str) -> tuple[str | None, str]:
    """The sandbox's id, if the word names one, and the path."""
    head, colon, path = word.partition(":")
    if colon and len(head) == ID_LENGTH and head.isalnum():
        return head, path or "."
    return None, word


async def _into(sandbox: Sandbox, source: Path, target: str, many: bool, user: str | None) -> None:
    if not source.name:
        source = source.resolve()
    try:
        is_folder = (await sandbox.files.stat(target, user=user)).is_folder
    except NotFound:
        is_folder = many or target.endswith("/")
    if is_folder:
        await sandbox.files.upload(source, target, user=user)
        return
    _must_be_one(many, target)
    place = PurePosixPath(target)
    await sandbox.files.upload(source, str(place.parent), name=place.name, user=user)


async def _out(sandbox: Sandbox, path: str, target: Path, many: bool, special: bool) -> None:
    if target.is_dir():
        await sandbox.files.download(path, target, special=special)
        return
    _must_be_one(many, str(target))
    if not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent}", code="no_such_folder")
    await sandbox.files.download(path, target.parent, name=target.name, special=special)


def _must_be_one(many: bool, target: str) -> None:
    if many:
        raise UserError(f"{target} is no folder", why="several sources need one")
