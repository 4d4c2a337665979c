"""Credentials as Docker keeps them: ``~/.docker/config.json`` and its helper programs."""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentenv.errors import InfraError, UserError
from agentenv.host.process import run
from agentenv.image.reference import DOCKER_HUB

HUB_KEY = "https://index.docker.io/v1/"  # what `docker login` writes for the hub
HELPER_DEADLINE = 60.0
NOT_FOUND = b"credentials not found"  # what a helper prints, with status 1


@dataclass(frozen=True, slots=True)
class Credentials:
    """A name and secret; with ``identity`` the secret is an OAuth2 refresh token."""

    user: str
    secret: str
    identity: bool = False


def config_file() -> Path:
    folder = os.environ.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"


async def find(host: str, path: Path | None = None) -> Credentials | None:
    """The credentials for a registry, None for anonymous.

    Raises UserError (``docker_config``) for a file that cannot be read, InfraError for a helper
    that fails.
    """
    path = path or config_file()
    if not path.exists():
        return None
    try:
        config = cast("dict[str, Any]", json.loads(path.read_text()))
        helper = _object(config, "credHelpers").get(host) or config.get("credsStore")
        if helper:
            return await _ask_helper(str(helper), HUB_KEY if host == DOCKER_HUB else host)
        return _from_file(_object(config, "auths"), host)
    except (OSError, ValueError, AttributeError, TypeError, binascii.Error) as error:
        raise UserError(f"{path} cannot be read", why=str(error), code="docker_config") from error


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    return config.get(key) or {}


def _from_file(auths: dict[str, Any], host: str) -> Credentials | None:
    keys = [host, f"https://{host}", f"http://{host}", f"https://{host}/v1/", f"https://{host}/v2/"]
    if host == DOCKER_HUB:
        keys = [HUB_KEY, f"index.{DOCKER_HUB}", *keys]
    for key in keys:
        entry: dict[str, str] | None = auths.get(key) or auths.get(key + "/")
        if not entry:
            continue
        if token := entry.get("identitytoken"):
            return Credentials("", token, identity=True)
        if encoded := entry.get("auth"):
            user, _, secret = base64.b64decode(encoded, validate=True).decode().partition(":")
            return Credentials(user, secret.strip("\0"))
        if entry.get("username"):
            return Credentials(entry["username"], entry.get("password", ""))
    return None


async def _ask_helper(name: str, server: str) -> Credentials | None:
    done = await run(
        (f"docker-credential-{name}", "get"),
        stdin=server.encode(),
        timeout=HELPER_DEADLINE,
        check=False,
    )
    if done.status:
        if NOT_FOUND in done.stdout.lower():
            return None
        raise InfraError(
            f"docker-credential-{name} failed",
            why=(done.stdout + done.stderr).decode(errors="replace").strip(),
            code="credential_helper",
        )
    answer = json.loads(done.stdout)
    return Credentials(
        "" if answer["Username"] == "<token>" else answer["Username"],
        answer["Secret"],
        identity=answer["Username"] == "<token>",
    )
