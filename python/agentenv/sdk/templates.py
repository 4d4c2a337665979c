"""Templates of the control plane: build, follow, tag, remove (E2B.md §1.2). JSON in and out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from agentenv.errors import ImageError
from agentenv.sdk.client import Client, error_from, unreachable

POLL_INTERVAL = 0.2  # seconds
PAGE = 100


class BuildFailed(ImageError):
    """``details``: the step, and of a command its exit code."""

    code = "build_failed"


class Templates:
    """By id, name or ``name:tag``. Raises as ``Client``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def all(self) -> list[dict[str, Any]]:
        return await self._client.call("GET", "/templates")

    async def get(self, key: str) -> dict[str, Any]:
        """With its builds, newest first."""
        return await self._client.call("GET", f"/templates/{_segment(key)}")

    async def remove(self, key: str) -> None:
        await self._client.call("DELETE", f"/templates/{_segment(key)}")

    async def tag(self, key: str, tags: Sequence[str]) -> None:
        body = {"target": key, "tags": list(tags)}
        await self._client.call("POST", "/templates/tags", json=body)

    async def untag(self, name: str, tags: Sequence[str]) -> None:
        body = {"name": name, "tags": list(tags)}
        await self._client.call("DELETE", "/templates/tags", json=body)

    async def request(self, name: str, **options: Any) -> dict[str, Any]:
        """A build that waits; ``options``: tags, cpuCount, memoryMB, diskSizeMB, engine."""
        given = {key: value for key, value in options.items() if value is not None}
        return await self._client.call("POST", "/v3/templates", json={"name": name, **given})

    async def has_files(self, template_id: str, name: str) -> tuple[bool, str]:
        """Whether files of this hash are there, and where to put them."""
        path = f"/templates/{_segment(template_id)}/files/{name}"
        found = await self._client.call("GET", path)
        return bool(found["present"]), str(found["url"])

    async def put_files(self, url: str, content: AsyncIterable[bytes]) -> None:
        import httpx

        try:
            answer = await self._client.http.put(url, content=content, timeout=None)
        except httpx.HTTPError as error:
            raise unreachable(self._client.address.url, error) from error
        if answer.is_error:
            body: Mapping[str, Any] = answer.json() if answer.content else {}
            raise error_from(answer.status_code, body)

    async def begin(self, template_id: str, build_id: str, recipe: Mapping[str, Any]) -> None:
        path = f"/v2/templates/{_segment(template_id)}/builds/{build_id}"
        await self._client.call("POST", path, json=recipe)

    async def cancel(self, template_id: str, build_id: str) -> None:
        path = f"/templates/{_segment(template_id)}/builds/{build_id}"
        await self._client.call("DELETE", path)

    async def follow(self, template_id: str, build_id: str) -> AsyncGenerator[dict[str, Any]]:
        """Its log entries as they come, to its end. Raises BuildFailed."""
        path = f"/templates/{_segment(template_id)}/builds/{build_id}/status"
        offset = 0
        while True:
            query = {"logsOffset": offset, "limit": PAGE}
            found = await self._client.call("GET", path, params=query)
            for entry in found["logEntries"]:
                yield entry
            offset += len(found["logEntries"])
            if found["logEntries"]:
                continue
            if found["status"] == "error":
                raise _failed(found.get("reason") or {})
            if found["status"] == "ready":
                return
            await asyncio.sleep(POLL_INTERVAL)


def _segment(key: str) -> str:
    return quote(key, safe="")


def _failed(reason: Mapping[str, Any]) -> BuildFailed:
    known = {name: reason[name] for name in ("step", "exitCode") if name in reason}
    step = f"step {reason['step']}: " if str(reason.get("step", "")).isdigit() else ""
    return BuildFailed(f"{step}{reason.get('message', 'the build failed')}", **known)
