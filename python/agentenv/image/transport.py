"""Requests to one registry endpoint: authentication, retries with back-off, resumed downloads.

Protocols: OCI distribution-spec 1.1, Docker's token authentication, RFC 9110 (Retry-After, Range).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from agentenv.errors import AgentEnvError, ImageError, InfraError, faults
from agentenv.image import credentials
from agentenv.image.manifest import MAX_BYTES, Descriptor, mismatch

log = logging.getLogger(__name__)

ATTEMPTS = 6  # of one request, or of one download without progress
CONNECT_ATTEMPTS = 3
FIRST_DELAY = 0.4  # seconds; doubled each time: about 12 s in all
LONGEST_WAIT = 60.0  # seconds that a Retry-After is obeyed for
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
TIMEOUT = httpx.Timeout(60.0, connect=15.0)
_PARAMETER = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"|(\w+)=([^\s,"]+)')


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``base`` is a URL without path; ``host`` is what credentials are kept under."""

    base: str
    host: str


class Missing(Exception):
    """The endpoint answers 404."""


class Transport:
    """One endpoint, one repository; used within one pull. ``login``: instead of what is found."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        endpoint: Endpoint,
        repository: str,
        login: credentials.Credentials | None = None,
    ) -> None:
        self._client, self.endpoint, self._login = client, endpoint, login
        self._prefix = f"{endpoint.base}/v2/{repository}/"
        self._scope = f"repository:{repository}:pull"
        self._authorization: str | None = None
        self._authorizing = asyncio.Lock()

    async def document(self, path: str, accept: tuple[str, ...] = ()) -> httpx.Response:
        """A small answer, whole. Raises Missing, ImageError, InfraError."""
        cause: Exception | str = ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with AsyncExitStack() as held:
                    answer = await self._send(held, path, {"Accept": ", ".join(accept) or "*/*"})
                    if int(answer.headers.get("Content-Length") or 0) > MAX_BYTES:
                        raise ImageError(
                            "the image's manifest is too long", code="manifest_invalid"
                        )
                    await answer.aread()
                    return answer
            except httpx.TransportError as error:
                cause = error
            await asyncio.sleep(_back_off(attempt))
        raise self._unreachable(cause)

    async def download(self, blob: Descriptor, target: Path, report: Callable[[int], None]) -> None:
        """Fetch a blob into ``target``, resuming where a connection broke; checks its digest."""
        hasher, have, failures = hashlib.sha256(), 0, 0
        with faults("the layer could not be kept"), target.open("wb", buffering=0) as out:
            while True:
                before = have
                try:
                    async with AsyncExitStack() as held:
                        wanted = {"Range": f"bytes={have}-"} if have else {}
                        answer = await self._send(held, f"blobs/{blob.digest}", wanted)
                        if have and answer.status_code != 206:
                            have, hasher = 0, hashlib.sha256()
                            out.seek(0)
                            out.truncate()
                        # Chunks as they come: gathered ones would be lost with the connection.
                        async for chunk in answer.aiter_raw():
                            out.write(chunk)
                            hasher.update(chunk)
                            have += len(chunk)
                            if have > blob.size:
                                break
                            report(have)
                    if have >= blob.size:
                        break
                    cause: Exception | str = f"it ended after {have} of {blob.size} bytes"
                except httpx.TransportError as error:
                    cause = error
                failures = 1 if have > before else failures + 1
                if failures >= ATTEMPTS:
                    raise self._unreachable(cause)
                log.info("download of %s broke (%s): going on", blob.digest, cause)
                await asyncio.sleep(_back_off(failures))
        found = "sha256:" + hasher.hexdigest()
        if have != blob.size or found != blob.digest:
            raise mismatch("a layer as the registry sent it", blob.digest, found)

    async def _send(
        self, held: AsyncExitStack, path: str, headers: dict[str, str]
    ) -> httpx.Response:
        """An answer of 200 or 206, not read yet; closed by ``held``."""
        challenged, delay = False, 0.0
        cause: Exception | str = ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                sent = {**headers, "Accept-Encoding": "identity"}
                if self._authorization:
                    sent["Authorization"] = self._authorization
                used = self._authorization
                stream = self._client.stream("GET", self._prefix + path, headers=sent)
                answer = await held.enter_async_context(stream)
                if answer.status_code in (200, 206):
                    return answer
                if answer.status_code == 401 and not challenged:
                    challenged = True
                    await self._authorize(answer.headers.get_list("WWW-Authenticate"), used)
                    continue
                if answer.status_code not in TRANSIENT:
                    raise await self._refused(answer)
                cause = f"it answers {answer.status_code}"
                delay = _retry_after(answer.headers.get("Retry-After"))
            except httpx.TransportError as error:
                cause, delay = error, 0.0
            if isinstance(cause, httpx.ConnectError) and attempt >= CONNECT_ATTEMPTS:
                break  # nobody is there, or nobody of that name
            if attempt < ATTEMPTS:
                await asyncio.sleep(delay or _back_off(attempt))
        raise self._unreachable(cause)

    async def _authorize(self, challenges: list[str], used: str | None) -> None:
        """Answer a 401: the header that goes with requests from now on."""
        async with self._authorizing:
            if self._authorization != used:
                return  # another request did it meanwhile
            known = self._login or await credentials.find(self.endpoint.host)
            for challenge in challenges:
                scheme, _, rest = challenge.partition(" ")
                if scheme.lower() == "bearer":
                    parameters = {m[0] or m[2]: m[1] or m[3] for m in _PARAMETER.findall(rest)}
                    token = await self._token(parameters, known)
                    self._authorization = f"Bearer {token}"
                    return
                if scheme.lower() == "basic" and known is not None:
                    basic = httpx.BasicAuth(known.user, known.secret)
                    request = next(basic.auth_flow(httpx.Request("GET", self._prefix)))
                    self._authorization = request.headers["Authorization"]
                    return
            raise self._denied("it asks for a login", known)

    async def _token(
        self, parameters: dict[str, str], known: credentials.Credentials | None
    ) -> str:
        realm = parameters.get("realm", "")
        if not realm.startswith(("https://", "http://")):
            raise self._denied(f"its token realm {realm!r} is no URL", known)
        scope = {"service": parameters.get("service", ""), "scope": self._scope}
        try:
            if known is not None and known.identity:
                form = {**scope, "grant_type": "refresh_token", "refresh_token": known.secret,
                        "client_id": "agentenv"}  # fmt: skip
                answer = await self._client.post(realm, data=form)
            else:
                login = (known.user, known.secret) if known else None
                answer = await self._client.get(realm, params=scope, auth=login)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if answer.status_code in TRANSIENT:
            raise self._unreachable(f"its token service answers {answer.status_code}")
        if answer.status_code != 200:
            raise self._denied(f"its token service answers {answer.status_code}", known)
        found = answer.json()
        return found.get("token") or found["access_token"]

    async def _refused(self, answer: httpx.Response) -> Exception:
        if answer.status_code == 404:
            return Missing()
        if answer.status_code in (401, 403):
            return self._denied(f"it answers {answer.status_code}", None)
        text = (await answer.aread())[:200].decode(errors="replace")
        return InfraError(
            f"registry {self.endpoint.host} refused",
            why=f"it answers {answer.status_code}: {text}",
            code="registry_failed",
        )

    def _denied(self, why: str, known: credentials.Credentials | None) -> AgentEnvError:
        fix = "check the login" if known else f"log in: docker login {self.endpoint.host}"
        return ImageError(
            f"registry {self.endpoint.host} does not give the image",
            why=f"{why}; it may be private or not exist",
            fix=fix,
            code="image_denied",
            http_status=403,
        )

    def _unreachable(self, cause: Exception | str) -> InfraError:
        return InfraError(
            f"registry {self.endpoint.host} is not reached",
            why=str(cause) or type(cause).__name__,
            fix="try again; for plain HTTP set insecure_registries",
            code="registry_unreachable",
        )


def _back_off(attempt: int) -> float:
    """Seconds before the next try, spread so that many clients do not come back together."""
    return FIRST_DELAY * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)  # noqa: S311


def _retry_after(value: str | None) -> float:
    """Seconds to wait by RFC 9110 §10.2.3; 0 if it says nothing usable."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT)
