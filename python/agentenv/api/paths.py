"""Names with a slash as one segment of a path.

Servers decode ``%2F`` before routing, so that `ns%2Fname` would be two segments; for templates it
stays encoded, and their handlers decode it.
"""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

PREFIXES = (b"/templates/", b"/v2/templates/")


class EncodedSlashes:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or b""
        if scope["type"] == "http" and raw.startswith(PREFIXES):
            scope = {**scope, "path": kept(raw)}
        await self._app(scope, receive, send)


def kept(raw: bytes) -> str:
    """The path with everything decoded but slashes."""
    parts = raw.partition(b"?")[0].decode("ascii", "replace").split("/")
    return "/".join(unquote(part).replace("/", "%2F") for part in parts)
