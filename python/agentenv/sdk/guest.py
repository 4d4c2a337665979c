"""Speaks with the agent in a sandbox: unary calls, streams, plain HTTP (E2B.md §2).

What breaks off is explained: was the sandbox ended, did its guest die, or is the node in trouble?
"""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from agentenv.errors import AgentEnvError, Conflict, GuestError, InfraError, NotFound, UserError
from agentenv.sdk.client import Client, unreachable
from agentenv.sdk.envelope import END_OF_STREAM, Decoder, encode

ENVD_PORT = 49983
# Output may pause for as long as the command thinks; the agent sends keepalives meanwhile.
STREAM_TIMEOUT = httpx.Timeout(None, connect=10.0)
KEEPALIVE_SECONDS = 50
Body = bytes | AsyncIterable[bytes]

_KINDS: dict[str, type[UserError]] = {"not_found": NotFound, "already_exists": Conflict}
_USER_FAULTS = {
    "invalid_argument", "unauthenticated", "failed_precondition", "permission_denied",
    "unimplemented", "not_supported", "resource_exhausted", "deadline_exceeded",
}  # fmt: skip
# How a machine ended, by who must act; `stopped` was asked for.
_GUEST_ENDS = {"panic", "out_of_memory", "unknown"}


class Guest:
    """The agent of one sandbox; ``sandbox`` is an answer of create or get.

    Every method raises UserError (NotFound, Conflict) for what the guest refuses, GuestError
    (``guest_died``) if the guest has died, InfraError for trouble of the node or on the way.
    """

    def __init__(self, client: Client, sandbox: Mapping[str, Any]) -> None:
        self.client = client
        self.sandbox_id = str(sandbox["sandboxID"])
        self.headers = {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": str(ENVD_PORT)}
        if token := sandbox.get("envdAccessToken"):
            self.headers["X-Access-Token"] = token

    async def call(self, method: str, message: Mapping[str, Any], user: str | None = None) -> Any:
        """One unary RPC, ``process.Process/List``: its answer."""
        headers = {"Connect-Protocol-Version": "1", **_as_user(user)}
        answer = await self.request("POST", f"/{method}", headers=headers, json=message)
        return answer.json()

    async def request(self, verb: str, path: str, **options: Any) -> httpx.Response:
        """One plain request whose answer is small."""
        async with self.open(verb, path, **options) as response:
            await response.aread()
            return response

    @asynccontextmanager
    async def open(
        self,
        verb: str,
        path: str,
        *,
        headers: Mapping[str, str | bytes] | None = None,
        **options: Any,
    ) -> AsyncGenerator[httpx.Response]:
        """One plain request whose answer is read as it comes."""
        merged: dict[str, Any] = {**self.headers, **(headers or {})}
        try:
            async with self.client.http.stream(
                verb, path, headers=merged, timeout=STREAM_TIMEOUT, **options
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise await self._refusal(response)
                yield response
        except httpx.ConnectError as error:
            raise unreachable(self.client.address.url, error) from error
        except httpx.HTTPError as error:
            raise await self.fate(str(error) or type(error).__name__) from error

    async def stream(
        self,
        method: str,
        message: Mapping[str, Any],
        user: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The messages of a streaming RPC; ``deadline`` in seconds is kept by the guest."""
        headers = {
            "Connect-Protocol-Version": "1",
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(KEEPALIVE_SECONDS),
            **_as_user(user),
        }
        if deadline is not None and math.isnan(deadline):
            raise UserError("the deadline is no number")
        if deadline is not None and not math.isinf(deadline):
            headers["Connect-Timeout-Ms"] = str(max(1, round(deadline * 1000)))
        decoder = Decoder()
        content = encode(dict(message))
        async with self.open("POST", f"/{method}", headers=headers, content=content) as response:
            async for data in response.aiter_raw():
                for flags, found in decoder.feed(data):
                    if flags & END_OF_STREAM:
                        if error := found.get("error"):
                            raise fault(error)
                        return
                    yield found
        raise await self.fate("the stream ended without its end")

    async def _refusal(self, response: httpx.Response) -> AgentEnvError:
        try:
            body: Mapping[str, Any] = response.json()
        except ValueError:
            body = {"message": response.text[:500]}
        # The data plane's own words have a number as code (E2B.md §2.1).
        if response.status_code in (502, 503):
            return await self.fate(str(body.get("message", "")))
        return fault({"code": _code(response.status_code), **_named(body)})

    async def fate(self, why: str) -> AgentEnvError:
        """What a broken connection means, by what the node knows of the sandbox."""
        try:
            found = await self.client.sandbox(self.sandbox_id)
        except NotFound as gone:
            return _ended(self.sandbox_id, gone)
        except AgentEnvError as error:
            return error
        if found["state"] == "paused":
            return Conflict(
                f"sandbox {self.sandbox_id} is paused",
                fix=f"aenv resume {self.sandbox_id}",
                state=found["state"],
            )
        return InfraError(
            f"the connection to sandbox {self.sandbox_id} broke off",
            why=why,
            fix="it still runs: ask again",
            code="connection_lost",
        )


def _ended(sandbox_id: str, gone: NotFound) -> AgentEnvError:
    cause: Mapping[str, Any] = gone.details.get("cause") or {}
    kind, reason = str(cause.get("kind", "")), str(cause.get("reason", ""))
    if kind in ("", "stopped"):
        return gone
    error = GuestError if kind in _GUEST_ENDS else InfraError
    code = "guest_died" if error is GuestError else "machine_failed"
    return error(f"sandbox {sandbox_id} died", why=reason, code=code, cause=dict(cause))


def fault(error: Mapping[str, Any]) -> AgentEnvError:
    """The typed error that an RPC's error stands for."""
    code, message = str(error.get("code", "unknown")), str(error.get("message", ""))
    if kind := _KINDS.get(code):
        return kind(message)
    if code in _USER_FAULTS:
        return UserError(message, code=code)
    return GuestError(message or "the guest refused", code="guest_" + code)


def _named(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without a numeric code, which says no more than the status."""
    return {key: value for key, value in body.items() if key != "code" or isinstance(value, str)}


def _code(status: int) -> str:
    known = {
        401: "unauthenticated",
        404: "not_found",
        409: "already_exists",
        501: "not_supported",
        507: "disk_full",
    }
    return known.get(status, "invalid_argument" if status < 500 else "failed")


def _as_user(name: str | None) -> dict[str, str]:
    if not name:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:".encode()).decode()}
