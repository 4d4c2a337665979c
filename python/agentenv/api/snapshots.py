"""Routes that pause, resume, save and copy sandboxes (E2B.md, rows P and S)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Response

from agentenv.api import paging, schemas
from agentenv.api.errors import body as body_of
from agentenv.cluster.contract import Cluster
from agentenv.errors import AgentEnvError, Conflict

Limit = Annotated[int, Query(ge=1, le=paging.MAX_LIMIT)]


def routes(cluster: Cluster, node: str, domain: str | None) -> APIRouter:
    router = APIRouter(tags=["sandboxes"])

    @router.post("/sandboxes/{sandbox_id}/connect")
    @router.post("/v2/sandboxes/{sandbox_id}/connect")
    async def connect(
        sandbox_id: str,
        response: Response,
        body: Annotated[schemas.ConnectBody | None, Body()] = None,
    ) -> dict[str, Any]:
        body = body or schemas.ConnectBody()
        info, resumed = await cluster.connect(
            sandbox_id, body.timeout, memory=body.memory is not False
        )
        response.status_code = 201 if resumed else 200
        return schemas.created(info, node, domain)

    @router.post("/sandboxes/{sandbox_id}/resume", status_code=201)
    async def resume(
        sandbox_id: str, body: Annotated[schemas.ConnectBody | None, Body()] = None
    ) -> dict[str, Any]:
        body = body or schemas.ConnectBody()
        if (await cluster.get(sandbox_id)).state.shown == "running":
            raise Conflict(f"sandbox {sandbox_id} is running", state="running")
        info, _ = await cluster.connect(sandbox_id, body.timeout, memory=body.memory is not False)
        return schemas.created(info, node, domain)

    @router.post("/sandboxes/{sandbox_id}/pause", status_code=204)
    async def pause(
        sandbox_id: str, body: Annotated[schemas.PauseBody | None, Body()] = None
    ) -> None:
        await cluster.pause(sandbox_id, (body or schemas.PauseBody()).how())

    @router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201)
    async def snapshot(
        sandbox_id: str, body: Annotated[schemas.SnapshotBody | None, Body()] = None
    ) -> dict[str, Any]:
        body = body or schemas.SnapshotBody()
        return schemas.snapshot(await cluster.snapshot(sandbox_id, body.name, body.how()))

    @router.post("/sandboxes/{sandbox_id}/fork", status_code=201)
    async def fork(
        sandbox_id: str, body: Annotated[schemas.ForkBody | None, Body()] = None
    ) -> list[dict[str, Any]]:
        body = body or schemas.ForkBody()
        made = await cluster.fork(sandbox_id, body.count, body.timeout)
        return [
            {"error": body_of(one.http_status, one.message, one.code, **one.details)}
            if isinstance(one, AgentEnvError)
            else {"sandbox": schemas.created(one, node, domain)}
            for one in made
        ]

    @router.get("/snapshots")
    async def list_snapshots(
        response: Response,
        sandboxID: str | None = None,
        name: str | None = None,
        limit: Limit = paging.MAX_LIMIT,
        nextToken: str | None = None,
    ) -> list[dict[str, Any]]:
        found = await cluster.snapshots(sandboxID, name)
        chosen, more = paging.cut(
            found, lambda info: (info.created, info.build_id), limit, nextToken
        )
        if more:
            response.headers["X-Next-Token"] = more
        return [schemas.snapshot(info) for info in chosen]

    return router
