"""Filters, order and paging of sandbox lists, with E2B's rules (E2B.md §1). Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from agentenv.errors import UserError
from agentenv.sandbox.record import SandboxInfo

MAX_LIMIT = 100
T = TypeVar("T")
Key = tuple[datetime, str]
"""What a list is ordered by."""


def parse_metadata(text: str | None) -> dict[str, str]:
    """The filter's pairs. The query layer has decoded once; each part is encoded once more."""
    if not text:
        return {}
    pairs = parse_qsl(text, keep_blank_values=True)
    return {unquote(key): unquote(value) for key, value in pairs}


def parse_states(text: str | None) -> frozenset[str]:
    """Raises UserError for a state that cannot be asked for."""
    states = frozenset((text or "running,paused").split(","))
    if unknown := states - {"running", "paused"}:
        raise UserError(f"unknown state {sorted(unknown)[0]!r}", fix="use running, paused or both")
    return states


def token(key: Key) -> str:
    return base64.urlsafe_b64encode(f"{key[0].isoformat()}__{key[1]}".encode()).decode()


def parse_token(text: str) -> Key:
    try:
        time, _, last = base64.urlsafe_b64decode(text.encode()).decode().rpartition("__")
        return datetime.fromisoformat(time), last
    except (ValueError, binascii.Error, UnicodeError):
        raise UserError("nextToken is not one of ours", code="invalid_token") from None


def page(
    sandboxes: Iterable[SandboxInfo],
    *,
    metadata: dict[str, str],
    template: str | None = None,
    started_after: datetime | None = None,
    ascending: bool = False,
    limit: int = MAX_LIMIT,
    next_token: str | None = None,
) -> tuple[Sequence[SandboxInfo], str | None]:
    """The asked-for page and the token of the next one, None at the end."""
    if started_after is not None and started_after.tzinfo is None:
        started_after = started_after.replace(tzinfo=UTC)

    def wanted(info: SandboxInfo) -> bool:
        return (
            metadata.items() <= info.metadata.items()
            and (template is None or template in (info.template_id, info.alias))
            and (started_after is None or info.started_at >= started_after)
        )

    def key(info: SandboxInfo) -> Key:
        return info.started_at, info.id

    chosen = sorted(filter(wanted, sandboxes), key=key, reverse=not ascending)
    if next_token:
        last = parse_token(next_token)
        chosen = [i for i in chosen if (key(i) > last if ascending else key(i) < last)]
    return _first(chosen, key, limit)


def cut(
    found: Sequence[T], key: Callable[[T], Key], limit: int, next_token: str | None
) -> tuple[Sequence[T], str | None]:
    """As ``page`` for things that are in order already, the latest first."""
    last = parse_token(next_token) if next_token else None
    chosen = [each for each in found if last is None or key(each) < last]
    return _first(chosen, key, limit)


def _first(
    chosen: Sequence[T], key: Callable[[T], Key], limit: int
) -> tuple[Sequence[T], str | None]:
    first = chosen[:limit]
    return first, token(key(first[-1])) if len(chosen) > limit else None
