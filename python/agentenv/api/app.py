"""The application: routes, key check, error answers; behind the data plane, on a unix socket."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, FastAPI

import agentenv
from agentenv.api import auth, errors, sandboxes, schemas
from agentenv.cluster.contract import Cluster
from agentenv.errors import NotFound


def create_app(cluster: Cluster, *, key: str, node: str, domain: str | None) -> FastAPI:
    """``domain`` is what SDKs build sandbox host names from; None lets them use their own."""
    app = FastAPI(
        title="AgentENV",
        version=agentenv.__version__,
        redirect_slashes=False,
        responses={"4XX": {"model": schemas.ErrorBody}, "5XX": {"model": schemas.ErrorBody}},
    )
    errors.install(app)

    @app.get("/health", tags=["health"])
    async def health() -> dict[str, Any]:
        return {"status": "ok", "version": agentenv.__version__, "node": node}

    guarded = [Depends(auth.require_key(key))]
    app.include_router(sandboxes.routes(cluster, node, domain), dependencies=guarded)
    app.include_router(_catalog_routes(cluster), dependencies=guarded)
    return app


def _catalog_routes(cluster: Cluster) -> APIRouter:
    router = APIRouter(tags=["catalog"])

    @router.get("/templates")
    async def templates() -> list[dict[str, Any]]:
        return [schemas.template(row, build) for row, build in await cluster.templates()]

    @router.get("/templates/aliases/{alias:path}")
    async def alias(alias: str) -> dict[str, Any]:
        row = await cluster.template(alias)
        return {"templateID": row.id, "public": row.public}

    @router.delete("/templates/{key:path}", status_code=204)
    async def drop_template(key: str) -> None:
        await cluster.drop_template(key)

    @router.get("/images")
    async def images() -> list[dict[str, Any]]:
        return [schemas.image(row) for row in await cluster.images()]

    @router.get("/nodes")
    async def nodes() -> list[dict[str, Any]]:
        return [asdict(node) for node in await cluster.nodes()]

    @router.get("/nodes/{node_id}")
    async def node(node_id: str) -> dict[str, Any]:
        for info in await cluster.nodes():
            if info.id == node_id:
                return asdict(info)
        raise NotFound(f"no node {node_id}", code="node_not_found")

    return router
