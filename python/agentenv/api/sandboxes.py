"""Sandbox routes of E2B's control plane, both generations, and `inspect` and `console` of ours."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Response

from agentenv.api import paging, schemas
from agentenv.cluster.contract import Cluster
from agentenv.errors import UserError

Limit = Annotated[int, Query(ge=1, le=paging.MAX_LIMIT)]


def routes(cluster: Cluster, node: str, domain: str | None) -> APIRouter:
    router = APIRouter(tags=["sandboxes"])

    async def create(body: schemas.CreateBody, secure: bool) -> dict[str, Any]:
        info = await cluster.create(body.request(secure=secure))
        return schemas.created(info, node, domain)

    @router.post("/sandboxes", status_code=201)
    async def create_v1(body: schemas.CreateBody) -> dict[str, Any]:
        return await create(body, bool(body.secure))

    @router.post("/v2/sandboxes", status_code=201)
    async def create_v2(body: schemas.CreateBody) -> dict[str, Any]:
        return await create(body, True)

    @router.get("/sandboxes")
    async def list_v1(metadata: str | None = None) -> list[dict[str, Any]]:
        pairs = paging.parse_metadata(metadata)
        chosen = [i for i in await cluster.list() if pairs.items() <= i.metadata.items()]
        return [schemas.listed(info, node) for info in chosen if info.state == "running"]

    @router.get("/v2/sandboxes")
    async def list_v2(
        response: Response,
        metadata: str | None = None,
        state: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        startedAfter: datetime | None = None,
        template: str | None = None,
        limit: Limit = paging.MAX_LIMIT,
        nextToken: str | None = None,
    ) -> list[dict[str, Any]]:
        states = paging.parse_states(state)
        running = [info for info in await cluster.list() if info.state in states]
        chosen, more = paging.page(
            running,
            metadata=paging.parse_metadata(metadata),
            template=template,
            started_after=startedAfter,
            ascending=order == "asc",
            limit=limit,
            next_token=nextToken,
        )
        response.headers["X-Total-Running"] = str(len(running))
        if more:
            response.headers["X-Next-Token"] = more
        return [schemas.listed(info, node) for info in chosen]

    @router.get("/sandboxes/{sandbox_id}")
    async def get(sandbox_id: str) -> dict[str, Any]:
        return schemas.detailed(await cluster.get(sandbox_id), node, domain)

    @router.delete("/sandboxes/{sandbox_id}", status_code=204)
    async def kill(sandbox_id: str) -> None:
        await cluster.kill(sandbox_id)

    @router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
    async def timeout(sandbox_id: str, body: schemas.TimeoutBody) -> None:
        await cluster.set_timeout(sandbox_id, body.timeout)

    @router.post("/sandboxes/{sandbox_id}/connect")
    @router.post("/v2/sandboxes/{sandbox_id}/connect")
    async def connect(
        sandbox_id: str, body: Annotated[schemas.ConnectBody | None, Body()] = None
    ) -> dict[str, Any]:
        info = await cluster.connect(sandbox_id, body.timeout if body else None)
        return schemas.created(info, node, domain)

    @router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204)
    async def refresh(
        sandbox_id: str, body: Annotated[schemas.RefreshBody | None, Body()] = None
    ) -> None:
        await cluster.connect(sandbox_id, body.duration if body else None)

    @router.get("/sandboxes/{sandbox_id}/inspect")
    async def inspect(sandbox_id: str) -> dict[str, Any]:
        return await cluster.inspect(sandbox_id)

    @router.get("/sandboxes/{sandbox_id}/console")
    async def console(
        sandbox_id: str, lines: Annotated[int, Query(ge=1, le=10_000)] = 200
    ) -> dict[str, Any]:
        return {"lines": list(await cluster.console(sandbox_id, lines))}

    @router.api_route(
        "/sandboxes/{sandbox_id}/{verb:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"]
    )
    async def later(sandbox_id: str, verb: str) -> None:
        """What E2B has and this version lacks: not to be taken for a sandbox that is not there."""
        await cluster.get(sandbox_id)
        raise UserError(
            f"'{verb}' of a sandbox is not supported by this version",
            code="not_supported",
            http_status=501,
        )

    return router
