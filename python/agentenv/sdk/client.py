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
CREATED = 201
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

    async def create(
        self,
        template: str,
        *,
        auto_pause: bool = False,
        auto_pause_memory: bool = True,
        auto_resume: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """``auto_pause``: at its deadline it is paused, not ended, with its memory or its disk
        alone; ``auto_resume``: traffic brings a paused one back. ``options``: fields of E2B's
        NewSandbox and ours, see ``api.schemas.CreateBody``.

        It carries a key of its own, so that a request which is sent again makes one sandbox.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if auto_pause:
            given["autoPause"] = True
        if not auto_pause_memory:
            given["autoPauseMemory"] = False
        if auto_resume:
            given["autoResume"] = {"enabled": True}
        return await self.call(
            "POST",
            "/v2/sandboxes",
            json={"templateID": template, **given},
            headers={"Idempotency-Key": uuid.uuid4().hex},
        )

    async def sandboxes(self, **filters: str) -> list[dict[str, Any]]:
        """All pages of the list, newest first; ``filters``: the query of E2B's list."""
        return await self._pages("/v2/sandboxes", filters)

    async def snapshots(
        self, sandbox_id: str | None = None, name: str | None = None
    ) -> list[dict[str, Any]]:
        """Snapshots made by request, newest first: all, of one sandbox, or of one name."""
        asked = {"sandboxID": sandbox_id, "name": name}
        return await self._pages("/snapshots", {k: v for k, v in asked.items() if v is not None})

    async def _pages(self, path: str, filters: Mapping[str, str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        query = dict(filters)
        while True:
            response = await self._send("GET", path, params=query)
            found += response.json()
            if not (more := response.headers.get("x-next-token")):
                return found
            query["nextToken"] = more

    async def sandbox(self, sandbox_id: str) -> dict[str, Any]:
        return await self.call("GET", _of(sandbox_id))

    async def inspect(self, sandbox_id: str) -> dict[str, Any]:
        return await self.call("GET", _of(sandbox_id, "inspect"))

    async def console(self, sandbox_id: str, lines: int) -> list[str]:
        path = _of(sandbox_id, "console")
        return (await self.call("GET", path, params={"lines": lines}))["lines"]

    async def metrics(self, sandbox_id: str) -> list[dict[str, Any]]:
        return await self.call("GET", _of(sandbox_id, "metrics"))

    async def logs(self, sandbox_id: str) -> list[dict[str, Any]]:
        path = f"/v2/sandboxes/{quote(sandbox_id, safe='')}/logs"
        found = await self.call("GET", path, params={"direction": "backward"})
        return found["logs"][::-1]

    async def set_network(
        self, sandbox_id: str, *, internet: bool, allow: Sequence[str], deny: Sequence[str]
    ) -> None:
        path = _of(sandbox_id, "network")
        rules = {"allowOut": [*allow], "denyOut": [*deny], "allow_internet_access": internet}
        await self.call("PUT", path, json=rules)

    async def kill(self, sandbox_id: str) -> None:
        await self.call("DELETE", _of(sandbox_id))

    async def set_timeout(self, sandbox_id: str, seconds: int) -> None:
        path = _of(sandbox_id, "timeout")
        await self.call("POST", path, json={"timeout": seconds})

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> None:
        """Durable on its node when this returns. Raises Conflict if it is paused already."""
        await self.call("POST", _of(sandbox_id, "pause"), json={"memory": memory})

    async def connect(
        self, sandbox_id: str, timeout: int | None = None, *, memory: bool = True
    ) -> tuple[dict[str, Any], bool]:
        """Have it run for ``timeout`` seconds at least, resumed if it is paused; whether it was.

        Without ``timeout`` a paused one gets the lifetime it had before. Without ``memory`` it is
        booted from its disk.
        """
        body = {"memory": memory} | ({} if timeout is None else {"timeout": timeout})
        response = await self._send("POST", _of(sandbox_id, "connect"), json=body)
        return response.json(), response.status_code == CREATED

    async def snapshot(
        self, sandbox_id: str, name: str | None = None, *, memory: bool = True
    ) -> dict[str, Any]:
        """Save it as it runs; ``snapshotID`` is a template from then on."""
        body = {"memory": memory} | ({"name": name} if name else {})
        return await self.call("POST", _of(sandbox_id, "snapshots"), json=body)

    async def fork(
        self, sandbox_id: str, count: int = 1, timeout: int | None = None
    ) -> list[dict[str, Any] | AgentEnvError]:
        """Copies of a running one, which goes on; for each that could not be made its error."""
        body = {"count": count} | ({} if timeout is None else {"timeout": timeout})
        made = await self.call("POST", _of(sandbox_id, "fork"), json=body)
        return [
            error_from(int(each["error"]["code"]), each["error"])
            if "error" in each
            else each["sandbox"]
            for each in made
        ]

    async def lineage(self, sandbox_id: str) -> dict[str, Any]:
        """Its ancestors, children, and what it holds alone."""
        return await self.call("GET", _of(sandbox_id, "lineage"))

    async def lineages(self) -> list[dict[str, Any]]:
        return await self.call("GET", "/lineage")

    async def rollback(self, sandbox_id: str, snapshot_id: str | None = None) -> dict[str, Any]:
        """Put it back to a snapshot of its line, the last one if none is named. Raises Conflict
        for another's; whatever fails, it runs on as before."""
        body = {"snapshotID": snapshot_id} if snapshot_id else {}
        return await self.call("POST", _of(sandbox_id, "rollback"), json=body)

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


def _of(sandbox_id: str, verb: str = "") -> str:
    path = f"/sandboxes/{quote(sandbox_id, safe='')}"
    return f"{path}/{verb}" if verb else path


def unreachable(url: str, error: Exception) -> InfraError:
    fix = "start it with `aenv serve`, or set AENV_URL"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        fix = "name who signed its certificate: AENV_CA_FILE=PEM"
    elif "illegal request line" in str(error):
        fix = "if it speaks TLS: AENV_URL=https://…"
    return InfraError(
        f"the server at {url} does not answer",
        why=str(error) or type(error).__name__,
        fix=fix,
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
