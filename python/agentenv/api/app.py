"""The application: routes, key check, error answers; behind the data plane, on a unix socket."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, FastAPI

import agentenv
from agentenv.api import auth, errors, sandboxes, schemas, templates
from agentenv.api.paths import EncodedSlashes
from agentenv.cluster.contract import Cluster
from agentenv.cluster.templates import Templates
from agentenv.errors import NotFound


def create_app(
    cluster: Cluster, made: Templates, *, key: str, node: str, domain: str | None
) -> FastAPI:
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
    app.include_router(templates.routes(made, key), dependencies=guarded)
    app.include_router(templates.upload_route(made, key))
    app.include_router(_catalog_routes(cluster), dependencies=guarded)
    app.add_middleware(EncodedSlashes)
    return app


def _catalog_routes(cluster: Cluster) -> APIRouter:
    router = APIRouter(tags=["catalog"])

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
