"""Templates and their builds as they are recorded: a named image, and what a name means."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from pydantic import TypeAdapter

from agentenv.model import Guest, Resources, new_id
from agentenv.store.records import DEFAULT_TAG, BuildRow, Records, TemplateRow
from agentenv.template.names import check

_GUEST = TypeAdapter(Guest)
_RESOURCES = TypeAdapter(Resources)
FIRST_ENGINE = "qemu"  # of builds that were recorded when there was no other


async def name_image(records: Records, image_id: str, name: str) -> BuildRow:
    """Make ``name`` (with tag) mean ``image_id`` from now on; sandboxes that run are not touched.

    Raises UserError for a name that cannot be.
    """
    asked = check(name)
    build = BuildRow(str(uuid.uuid4()), new_id(), image_id, datetime.now(UTC))
    return await records.add_build(build, asked.name, (asked.tag,))


async def find_build(records: Records, key: str) -> tuple[TemplateRow, BuildRow] | None:
    """The template and build that ``key`` (id, name, ``name:tag``) means now, or None."""
    name, _, tag = key.partition(":")
    template = await records.template(name.lower())
    if template is None:
        return None
    build_id = template.tags.get(tag or DEFAULT_TAG)
    build = await records.build(build_id) if build_id else None
    return (template, build) if build else None


def is_image(build: BuildRow) -> bool:
    """Whether it is an image under a name, and was not built or saved."""
    return build.snapshot_id is None and build.image_id is not None


def called(template: TemplateRow) -> str:
    """What it is asked for by: its first name, or its id if it has none (a sandbox's snapshot)."""
    return template.names[0] if template.names else template.id


def guest_of_build(build: BuildRow) -> Guest | None:
    """What its steps say of the guest; None if it was not built by steps."""
    found = build.doc.get("guest")
    return _GUEST.validate_python(found) if found else None


def engine_of_build(build: BuildRow) -> str | None:
    """The engine whose sandboxes can be made from it; None if that is chosen for each."""
    if build.snapshot_id is None:
        return None
    return build.doc.get("engine", FIRST_ENGINE)


def resources_of_build(build: BuildRow) -> Resources | None:
    """The size that it was built with; None if that is chosen for each sandbox."""
    found = build.doc.get("resources")
    return _RESOURCES.validate_python(found) if found else None
