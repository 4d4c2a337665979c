"""`aenv tree`: who came from whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from agentenv.cli import output
from agentenv.cli.output import Form, Output
from agentenv.cli.server import Home, Url, ask, known_ids
from agentenv.sdk.client import Client


@dataclass
class Branch:
    """One of a line, and those that came from it by (kind, id)."""

    label: str
    below: dict[tuple[str, str], Branch] = field(default_factory=dict["tuple[str, str]", "Branch"])


def command(
    sandbox_id: Annotated[
        str | None, typer.Argument(help="Only its line [all]", autocompletion=known_ids)
    ] = None,
    form: Output = Form.AUTO,
    home: Home = None,
    url: Url = None,
) -> None:
    """Show where sandboxes come from (templates, snapshots, forks), their state, and the memory and
    disk that each holds alone.

    Examples: aenv tree    aenv tree a1b2…
    """

    async def work(client: Client) -> list[dict[str, Any]]:
        if sandbox_id is None:
            return await client.lineages()
        own = await client.lineage(sandbox_id)
        return [own, *(one for one in await client.lineages() if is_below(one, sandbox_id))]

    found = ask(home, url, work)
    if output.as_json(form):
        output.dump(found)
    else:
        draw(grown(found))


def is_below(one: Mapping[str, Any], sandbox_id: str) -> bool:
    return any(each["id"] == sandbox_id for each in one["ancestors"])


def grown(found: Sequence[Mapping[str, Any]]) -> Branch:
    """A tree of lineages, roots below a branch without a label. Pure."""
    root = Branch("")
    labels = {one["id"]: _label(one) for one in found}
    for one in found:
        here = root
        for each in reversed(one["ancestors"]):
            called = labels.get(each["id"]) or _relative(each)
            here = here.below.setdefault((each["kind"], each["id"]), Branch(called))
        here.below.setdefault(("sandbox", one["id"]), Branch(labels[one["id"]]))
    return root


def _relative(each: Mapping[str, Any]) -> str:
    if each["kind"] != "sandbox":
        return f"{each['id']} ({each['kind']})"
    return f"{each['id']} {each['state'] or 'forgotten'}"


def _label(one: Mapping[str, Any]) -> str:
    own = one["own"]
    held = f"{size(own['memory_bytes'])} memory, {size(own['disk_bytes'])} disk"
    return f"{one['id']} {one['state']}, own: {held}"


def size(number: int) -> str:
    """In MiB, as far as it is worth saying."""
    return f"{number / (1 << 20):.1f} MiB"


def draw(root: Branch) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.tree import Tree

    def add(to: Tree, branch: Branch) -> None:
        for each in branch.below.values():
            add(to.add(escape(each.label)), each)

    whole = Tree("", hide_root=True)
    add(whole, root)
    Console().print(whole, soft_wrap=True)
