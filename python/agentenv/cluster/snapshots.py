"""Named snapshots of sandboxes: templates that nobody built (E2B.md, rows S)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from agentenv.cluster.contract import SnapshotInfo
from agentenv.errors import Conflict
from agentenv.model import new_id
from agentenv.node.lineage import SOURCE
from agentenv.node.node import Node
from agentenv.sandbox.suspend import How
from agentenv.store.records import DEFAULT_TAG, BuildRow, Records, TemplateRow
from agentenv.template.named import find_build, is_image
from agentenv.template.names import TemplateName, check


async def take(node: Node, sandbox_id: str, name: str | None, how: How) -> SnapshotInfo:
    """Save a running sandbox under a name, or none. Raises UserError for a name that cannot be,
    and as ``Node.snapshot``."""
    asked = check(name) if name is not None else None
    if asked and (found := await find_build(node.records, f"{asked.name}:{asked.tag}")):
        _must_not_be_image(asked, found[1])
    async with node.taking(sandbox_id, how) as made:
        build = BuildRow(
            str(uuid.uuid4()),
            new_id(),
            made.image_id,
            datetime.now(UTC),
            {SOURCE: sandbox_id},
            made.id,
        )
        tag = asked.tag if asked else DEFAULT_TAG
        build = await node.records.add_build(build, asked.name if asked else None, (tag,))
    names = (f"{asked.name}:{asked.tag}",) if asked else ()
    return SnapshotInfo(build.template_id, build.id, names, sandbox_id, build.created)


def _must_not_be_image(asked: TemplateName, build: BuildRow) -> None:
    if is_image(build):
        raise Conflict(
            f"the name {asked.name} is an image's",
            fix="take another one, or a tag",
            code="name_taken",
        )


async def find(
    records: Records, sandbox_id: str | None, name: str | None
) -> Sequence[SnapshotInfo]:
    """Newest first. An unknown name finds none."""
    found: list[SnapshotInfo] = []
    for template in await records.templates():
        for tag, build_id in template.tags.items():
            build = await records.build(build_id)
            if build is None or SOURCE not in build.doc:
                continue
            source = build.doc[SOURCE]
            names = tuple(f"{each}:{tag}" for each in template.names)
            if sandbox_id in (None, source) and _is_named(name, template, tag):
                found.append(SnapshotInfo(template.id, build.id, names, source, build.created))
    return sorted(found, key=lambda info: info.created, reverse=True)


def _is_named(name: str | None, template: TemplateRow, tag: str) -> bool:
    if name is None:
        return True
    wanted, _, wanted_tag = name.lower().partition(":")
    return wanted in (template.id, *template.names) and wanted_tag in ("", tag)
