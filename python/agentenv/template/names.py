"""Names of templates: ``[namespace/]alias[:tag]``, lower case (E2B.md §1.1). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from agentenv.errors import UserError
from agentenv.store.records import DEFAULT_TAG

_PART = re.compile(r"^[a-z0-9\-_]+$")
_TAG = re.compile(r"^[a-z0-9\-_.]+$")
_UUID = re.compile(r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
MAX_LENGTH = 128
__all__ = ["DEFAULT_TAG", "TemplateName", "check", "check_tags", "means_image", "parse"]


@dataclass(frozen=True, slots=True)
class TemplateName:
    """``name`` is ``alias`` or ``namespace/alias``; ``tag`` is ``default`` unless given."""

    name: str
    tag: str = DEFAULT_TAG


def parse(text: str) -> TemplateName | None:
    """The name in ``text``, None if it has another form (an image reference, say)."""
    name, _, tag = text.lower().partition(":")
    parts = name.split("/")
    if len(text) > MAX_LENGTH or len(parts) > 2 or not all(_PART.match(part) for part in parts):
        return None
    if ":" in text and not _TAG.match(tag):
        return None
    return TemplateName(name, tag or DEFAULT_TAG)


def check(text: str) -> TemplateName:
    """As ``parse``; raises UserError for what is no name a template can be given."""
    found = parse(text)
    if found is None or _UUID.match(found.tag):
        raise UserError(
            f"{text!r} is no template name",
            why="it takes [namespace/]alias[:tag] in [a-z0-9-_], tags also with dots",
            code="invalid_name",
        )
    return found


def means_image(text: str) -> bool:
    """Whether an unknown template may be meant as an image to start cold from.

    A bare word is only ever a template's name; a registry, path, tag or scheme makes a reference.
    """
    return "/" in text or ":" in text or "@" in text


def check_tags(name: str, tags: Iterable[str]) -> tuple[str, ...]:
    """Tags for the template ``name``, each bare or as ``name:tag``, without double ones.

    Raises UserError (``invalid_tag``).
    """
    found: list[str] = []
    for text in tags:
        prefix, colon, tag = text.lower().rpartition(":")
        if (colon and prefix != name) or not _TAG.match(tag) or _UUID.match(tag):
            raise UserError(f"{text!r} is no tag", why="it takes [a-z0-9-_.]", code="invalid_tag")
        found.append(tag)
    return tuple(dict.fromkeys(found))
