"""API keys: one per node for now, compared by hash in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import Request

from agentenv.errors import InfraError, Unauthorized

# Older E2B SDKs check the key's form before they send it (E2B.md §1).
KEY_BYTES = 20


def load_or_create_key(path: Path) -> str:
    """``$AENV_API_KEY``, else the key in ``path``, made at first use (0600)."""
    if given := os.environ.get("AENV_API_KEY"):
        return given
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(f"e2b_{secrets.token_hex(KEY_BYTES)}\n")
        fresh.rename(path)
    key = path.read_text().strip()
    if not key:
        raise InfraError(f"the API key file {path} is empty", fix="delete it to make a new key")
    return key


WHERE = "the key lies in the server's HOME/secrets/api-key"


def require_key(key: str) -> Callable[[Request], Awaitable[None]]:
    """A dependency that raises Unauthorized unless the request carries ``key``."""
    expected = hashlib.sha256(key.encode()).digest()

    async def check(request: Request) -> None:
        given = request.headers.get("x-api-key", "")
        if not given:
            raise Unauthorized("the X-API-Key header is missing", fix=WHERE)
        if not hmac.compare_digest(hashlib.sha256(given.encode()).digest(), expected):
            raise Unauthorized("the API key is not known")

    return check
