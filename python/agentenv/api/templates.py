"""Template routes of E2B's control plane: builds, files, tags; cancelling a build is ours.

Names may hold a slash, which arrives encoded as one segment (see `paths`).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Body, Path, Query, Request, Response

from agentenv.api import template_schemas as schemas
from agentenv.cluster.templates import Templates
from agentenv.errors import Unauthorized
from agentenv.template.journal import PAGE

UPLOAD_SECONDS = 3600  # how long an upload's address is good
Hash = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
Level = Literal["debug", "info", "warn", "error"]
Offset = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(ge=1, le=PAGE)]


def routes(templates: Templates, key: str) -> APIRouter:
    router = APIRouter(tags=["templates"])

    @router.post("/v3/templates", status_code=202)
    async def request(body: schemas.TemplateBody) -> dict[str, Any]:
        row, build = await templates.request(body.named(), body.tags or (), body.resources())
        return schemas.requested(row, build)

    @router.get("/templates")
    async def all_templates() -> list[dict[str, Any]]:
        return [schemas.template(row, builds) for row, builds in await templates.all()]

    @router.get("/templates/aliases/{alias}")
    async def alias(alias: str) -> dict[str, Any]:
        row, _ = await templates.get(unquote(alias))
        return {"templateID": row.id, "public": row.public}

    @router.post("/templates/tags", status_code=201)
    async def tag(body: schemas.TagsBody) -> dict[str, Any]:
        build, given = await templates.tag(body.target, body.tags)
        return {"tags": list(given), "buildID": build.id}

    @router.delete("/templates/tags", status_code=204)
    async def untag(body: Annotated[schemas.UntagBody, Body()]) -> None:
        await templates.untag(body.name, body.tags)

    @router.get("/templates/{template}/tags")
    async def tags(template: str) -> list[dict[str, Any]]:
        return schemas.tags(*await templates.get(unquote(template)))

    @router.get("/templates/{template}/files/{name}", status_code=201)
    async def files(template: str, name: Hash, request: Request) -> dict[str, Any]:
        await templates.get(unquote(template))
        until = int(time.time()) + UPLOAD_SECONDS
        query = f"until={until}&signature={_signature(key, name, until)}"
        proto = request.headers.get("x-forwarded-proto", request.url.scheme)
        url = f"{proto}://{request.headers['host']}/uploads/{name}?{query}"
        return {"present": await templates.has_files(name), "url": url, "headers": {}}

    @router.post("/v2/templates/{template}/builds/{build_id}", status_code=202)
    async def begin(template: str, build_id: str, body: schemas.BuildBody) -> Response:
        await templates.begin(unquote(template), build_id, body.recipe(), body.login())
        return Response(status_code=202)

    @router.get("/templates/{template}/builds/{build_id}/status")
    async def status(
        template: str,
        build_id: str,
        logsOffset: Offset = 0,
        limit: Limit = PAGE,
        level: Level | None = None,
    ) -> dict[str, Any]:
        found = await templates.progress(unquote(template), build_id, logsOffset, limit, level)
        return schemas.status(found.row.template_id, found)

    @router.get("/templates/{template}/builds/{build_id}/logs")
    async def logs(
        template: str,
        build_id: str,
        cursor: Offset = 0,
        limit: Limit = PAGE,
        level: Level | None = None,
    ) -> dict[str, Any]:
        found = await templates.progress(unquote(template), build_id, cursor, limit, level)
        return {"logs": [schemas.log_entry(entry) for entry in found.entries]}

    @router.delete("/templates/{template}/builds/{build_id}", status_code=204)
    async def cancel(template: str, build_id: str) -> None:
        await templates.cancel(unquote(template), build_id)

    @router.get("/templates/{template}")
    async def get(template: str) -> dict[str, Any]:
        return schemas.detailed(*await templates.get(unquote(template)))

    @router.patch("/v2/templates/{template}")
    async def publish(template: str, body: schemas.PublicBody) -> dict[str, Any]:
        row = await templates.publish(unquote(template), body.public)
        return {"names": list(row.names)}

    @router.delete("/templates/{template:path}", status_code=204)
    async def remove(template: str) -> None:
        await templates.remove(unquote(template))

    return router


def upload_route(templates: Templates, key: str) -> APIRouter:
    """Its address is signed: SDKs send no key with it."""
    router = APIRouter(tags=["templates"])

    @router.put("/uploads/{name}", status_code=204)
    async def upload(name: Hash, until: int, signature: str, request: Request) -> None:
        wanted = _signature(key, name, until)
        if not hmac.compare_digest(signature.encode(), wanted.encode()) or until < time.time():
            raise Unauthorized("the upload's address is not ours, or too old")
        await templates.put_files(name, request.stream())

    return router


def _signature(key: str, name: str, until: int) -> str:
    text = f"upload:{name}:{until}"
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
