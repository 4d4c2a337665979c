"""One build of a template: begun, its log shown as it comes, cancelled if the user leaves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Mapping
from typing import Any

from agentenv.sdk.templates import Templates

COLOURS = {"error": "\033[31m", "warn": "\033[33m", "debug": "\033[2m"}


async def follow_build(
    templates: Templates, made: Mapping[str, Any], recipe: Awaitable[Mapping[str, Any]]
) -> None:
    """``made`` as the server answered; ``recipe`` may take a while. Raises BuildFailed."""
    template_id, build_id = made["templateID"], made["buildID"]
    try:
        await templates.begin(template_id, build_id, await recipe)
        async for entry in templates.follow(template_id, build_id):
            _show(entry)
    except asyncio.CancelledError:
        await asyncio.shield(templates.cancel(template_id, build_id))
        raise


def _show(entry: Mapping[str, Any]) -> None:
    """On stderr: what a build gives is its template."""
    text = str(entry["message"])
    colour = COLOURS.get(entry["level"], "") if sys.stderr.isatty() else ""
    print(f"{colour}{text}\033[0m" if colour else text, file=sys.stderr)
