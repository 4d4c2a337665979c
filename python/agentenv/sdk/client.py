"""Async client of the control plane."""

from __future__ import annotations

import asyncio
import os
import ssl
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx

from agentenv.errors import (
    AgentEnvError,
    Conflict,
    GuestError,
    ImageError,
    InfraError,
    NotFound,
    Unauthorized,
    UserError,
)

# Creation may pull an image first; connecting must not hang.
TIMEOUT = httpx.Timeout(600.0, connect=5.0)
RETRY_AFTER = (0.1, 0.4, 1.0)  # seconds before each attempt after the first
_BY_STATUS: dict[int, type[AgentEnvError]] = {
    401: Unauthorized, 404: NotFound, 409: Conflict, 422: ImageError, 503: InfraError,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is and the key that opens it."""

    url: str
    key: str

    @classmethod
    def find(cls, url: str | None, home: Path, listen: str, scheme: str = "http") -> Address:
        """From the arguments, ``AENV_URL`` and ``AENV_API_KEY``, or the local home."""
        key = os.environ.get("AENV_API_KEY", "")
        if not key:
            try:
                key = (home / "secrets" / "api-key").read_text().strip()
            except OSError as error:
                raise UserError(
                    "no API key",
                    why=f"{home}/secrets/api-key: {error.strerror}",
                    fix="start the server (aenv serve), give its --home, or set AENV_API_KEY",
                    code="no_api_key",
                ) from error
        return cls(url or os.environ.get("AENV_URL") or f"{scheme}://{listen}", key)


class Client:
    """``async with Client(address) as client``: one method per call, JSON values in and out.

    Raises the error of ``agentenv.errors`` that the server named, InfraError
    (``server_unreachable``) when there is no server. ``verify`` false takes any certificate.
    """

    def __init__(
        self, address: Address, *, timeout: httpx.Timeout = TIMEOUT, verify: bool = True
    ) -> None:
        self.address = address
        self.http = httpx.AsyncClient(
            base_url=address.url,
            timeout=timeout,
            trust_env=False,
            verify=self.ssl_context() if verify and address.url.startswith("https:") else False,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """Trusts the usual authorities, or those in ``$AENV_CA_FILE``. Raises UserError."""
        path = os.environ.get("AENV_CA_FILE") or None
        try:
            return ssl.create_default_context(cafile=path)
        except OSError as error:  # SSLError is one
            raise UserError(
                f"AENV_CA_FILE {path} cannot be used",
                why=error.strerror or str(error),
                fix="give a PEM file with certificates",
                code="bad_ca_file",
            ) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def create(self, template: str, **options: Any) -> dict[str, Any]:
        """``options``: fields of E2B's NewSandbox and ours, see ``api.schemas.CreateBody``.

        It carries a key of its own, so that a request which is sent again makes one sandbox.
        """
        given = {name: value for name, value in options.items() if value is not None}
        return await self.call(
            "POST",
            "/v2/sandboxes",
            json={"templateID": template, **given},
            headers={"Idempotency-Key": uuid.uuid4().hex},
        )

    async def sandboxes(self, **filters: str) -> list[dict[str, Any]]:
        """All pages of the list, newest first; ``filters``: the query of E2B's list."""
        found: list[dict[str, Any]] = []
        query = dict(filters)
        while True:
            response = await self._send("GET", "/v2/sandboxes", params=query)
            found += response.json()
            if not (more := response.headers.get("x-next-token")):
                return found
            query["nextToken"] = more

    async def sandbox(self, sandbox_id: str) -> dict[str, Any]:
        return await self.call("GET", f"/sandboxes/{quote(sandbox_id, safe='')}")

    async def inspect(self, sandbox_id: str) -> dict[str, Any]:
        return await self.call("GET", f"/sandboxes/{quote(sandbox_id, safe='')}/inspect")

    async def console(self, sandbox_id: str, lines: int) -> list[str]:
        path = f"/sandboxes/{quote(sandbox_id, safe='')}/console"
        return (await self.call("GET", path, params={"lines": lines}))["lines"]

    async def metrics(self, sandbox_id: str) -> list[dict[str, Any]]:
        return await self.call("GET", f"/sandboxes/{quote(sandbox_id, safe='')}/metrics")

    async def logs(self, sandbox_id: str) -> list[dict[str, Any]]:
        path = f"/v2/sandboxes/{quote(sandbox_id, safe='')}/logs"
        found = await self.call("GET", path, params={"direction": "backward"})
        return found["logs"][::-1]

    async def set_network(
        self, sandbox_id: str, *, internet: bool, allow: Sequence[str], deny: Sequence[str]
    ) -> None:
        path = f"/sandboxes/{quote(sandbox_id, safe='')}/network"
        rules = {"allowOut": [*allow], "denyOut": [*deny], "allow_internet_access": internet}
        await self.call("PUT", path, json=rules)

    async def kill(self, sandbox_id: str) -> None:
        await self.call("DELETE", f"/sandboxes/{quote(sandbox_id, safe='')}")

    async def set_timeout(self, sandbox_id: str, seconds: int) -> None:
        path = f"/sandboxes/{quote(sandbox_id, safe='')}/timeout"
        await self.call("POST", path, json={"timeout": seconds})

    async def call(self, method: str, path: str, **options: Any) -> Any:
        """One request of the control plane: its answer, None without one."""
        response = await self._send(method, path, **options)
        return response.json() if response.content else None

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Sent again where that is safe: nothing was sent, or the server says so."""
        headers = {"X-API-Key": self.address.key, **options.pop("headers", {})}
        for pause in (*RETRY_AFTER, None):
            wait = pause
            try:
                response = await self.http.request(method, path, headers=headers, **options)
            except httpx.HTTPError as error:
                if wait is None or not isinstance(error, httpx.ConnectError):
                    raise unreachable(self.address.url, error) from error
            else:
                if not response.is_error:
                    return response
                if wait is None or response.headers.get("should-retry") != "true":
                    raise error_from(response.status_code, _json(response))
                wait = float(response.headers.get("retry-after", wait))
            await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")


def unreachable(url: str, error: Exception) -> InfraError:
    return InfraError(
        f"the server at {url} does not answer",
        why=str(error) or type(error).__name__,
        fix="start it with `aenv serve`, or set AENV_URL",
        code="server_unreachable",
    )


def error_from(status: int, body: Mapping[str, Any]) -> AgentEnvError:
    """The typed error that an answer stands for."""
    code = str(body.get("error_code") or body.get("code") or "http")
    if code == "503":  # the data plane's own word, while no server stands behind it
        code = "server_unreachable"
    kind = GuestError if code.startswith("guest_") else _BY_STATUS.get(status)
    if kind is None:
        kind = UserError if status < 500 else InfraError
    message = str(body.get("message") or f"HTTP status {status}")
    return kind(message, code=code, http_status=status, **dict(body.get("details") or {}))


def _json(response: httpx.Response) -> Mapping[str, Any]:
    try:
        return response.json()
    except ValueError:
        return {"message": response.text[:500]}
