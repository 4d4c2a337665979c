"""Routes of ours about where sandboxes come from, and the way back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body

from agentenv.api import schemas
from agentenv.cluster.contract import Cluster


def routes(cluster: Cluster, node: str, domain: str | None) -> APIRouter:
    router = APIRouter(tags=["lineage"])

    @router.get("/lineage")
    async def lineages() -> list[dict[str, Any]]:
        return [asdict(each) for each in await cluster.lineages()]

    @router.get("/sandboxes/{sandbox_id}/lineage")
    async def lineage(sandbox_id: str) -> dict[str, Any]:
        return asdict(await cluster.lineage(sandbox_id))

    @router.post("/sandboxes/{sandbox_id}/rollback")
    async def rollback(
        sandbox_id: str, body: Annotated[schemas.RollbackBody | None, Body()] = None
    ) -> dict[str, Any]:
        body = body or schemas.RollbackBody()
        info = await cluster.rollback(sandbox_id, body.snapshotID)
        return schemas.created(info, node, domain)

    return router
