"""Sandbox routes of E2B's control plane, both generations, and `inspect` and `console` of ours."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Header, Query, Response

from agentenv.api import lineage, paging, schemas, snapshots
from agentenv.cluster.contract import Cluster
from agentenv.errors import Conflict, UserError
from agentenv.sandbox import logs

Limit = Annotated[int, Query(ge=1, le=paging.MAX_LIMIT)]
LogLimit = Annotated[int, Query(ge=1, le=1000)]
LATEST = 253_402_300_799  # Unix seconds: the last moment that a datetime can tell
Seconds = Annotated[int | None, Query(ge=0, le=LATEST, description="Unix time in seconds")]
Milliseconds = Annotated[
    int | None, Query(ge=0, le=LATEST * 1000, description="Unix time in milliseconds")
]
Key = Annotated[str | None, Header(alias="Idempotency-Key")]


def moment(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)


def routes(cluster: Cluster, node: str, domain: str | None) -> APIRouter:
    router = APIRouter(tags=["sandboxes"])
    router.include_router(snapshots.routes(cluster, node, domain))
    router.include_router(lineage.routes(cluster, node, domain))

    async def create(body: schemas.CreateBody, secure: bool, key: str | None) -> dict[str, Any]:
        info = await cluster.create(body.request(secure=secure, idempotency_key=key))
        return schemas.created(info, node, domain)

    @router.post("/sandboxes", status_code=201)
    async def create_v1(body: schemas.CreateBody, key: Key = None) -> dict[str, Any]:
        return await create(body, bool(body.secure), key)

    @router.post("/v2/sandboxes", status_code=201)
    async def create_v2(body: schemas.CreateBody, key: Key = None) -> dict[str, Any]:
        return await create(body, True, key)

    @router.get("/sandboxes")
    async def list_v1(metadata: str | None = None) -> list[dict[str, Any]]:
        pairs = paging.parse_metadata(metadata)
        chosen = [i for i in await cluster.list() if pairs.items() <= i.metadata.items()]
        return [schemas.listed(info, node) for info in chosen if info.state.shown == "running"]

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
        running = [info for info in await cluster.list() if info.state.shown in states]
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

    # Before the route that takes any name for an id.
    @router.get("/sandboxes/metrics")
    async def metrics_of_many(sandbox_ids: str) -> dict[str, Any]:
        wanted = {name for name in sandbox_ids.split(",") if name}
        if len(wanted) > paging.MAX_LIMIT:
            raise UserError(f"sandbox_ids names more than {paging.MAX_LIMIT} sandboxes")
        known = wanted & {info.id for info in await cluster.list()}
        found = {name: await cluster.metrics(name, 0, math.inf) for name in sorted(known)}
        newest = {name: schemas.metric(samples[-1]) for name, samples in found.items() if samples}
        return {"sandboxes": newest}

    @router.get("/sandboxes/{sandbox_id}")
    async def get(sandbox_id: str) -> dict[str, Any]:
        return schemas.detailed(await cluster.get(sandbox_id), node, domain)

    @router.delete("/sandboxes/{sandbox_id}", status_code=204)
    async def kill(sandbox_id: str) -> None:
        await cluster.kill(sandbox_id)

    @router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
    async def timeout(sandbox_id: str, body: schemas.TimeoutBody) -> None:
        await cluster.set_timeout(sandbox_id, body.timeout)

    @router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204)
    async def refresh(
        sandbox_id: str, body: Annotated[schemas.RefreshBody | None, Body()] = None
    ) -> None:
        if (await cluster.get(sandbox_id)).state.shown != "running":
            raise Conflict(f"sandbox {sandbox_id} is paused", state="paused")
        await cluster.connect(sandbox_id, body.duration if body else None)

    @router.put("/sandboxes/{sandbox_id}/network", status_code=204)
    async def network(
        sandbox_id: str, body: Annotated[schemas.EgressBody | None, Body()] = None
    ) -> None:
        body = body or schemas.EgressBody()
        internet = body.allow_internet_access is not False
        await cluster.set_network(sandbox_id, internet, *body.rules())

    @router.get("/sandboxes/{sandbox_id}/metrics")
    async def metrics(
        sandbox_id: str, start: Seconds = None, end: Seconds = None
    ) -> list[dict[str, Any]]:
        until = math.inf if end is None else end
        return [schemas.metric(s) for s in await cluster.metrics(sandbox_id, start or 0, until)]

    @router.get("/sandboxes/{sandbox_id}/logs")
    async def logs_v1(
        sandbox_id: str, start: Milliseconds = None, limit: LogLimit = 1000
    ) -> dict[str, Any]:
        found = logs.select(await cluster.logs(sandbox_id), since=moment(start), limit=limit)
        lines = [{"timestamp": e.time.isoformat(), "line": e.message} for e in found]
        return {"logs": lines, "logEntries": [schemas.log_entry(entry) for entry in found]}

    @router.get("/v2/sandboxes/{sandbox_id}/logs")
    async def logs_v2(
        sandbox_id: str,
        cursor: Milliseconds = None,
        limit: LogLimit = 1000,
        direction: Literal["forward", "backward"] = "forward",
        level: logs.Level | None = None,
        search: Annotated[str | None, Query(max_length=1000)] = None,
    ) -> dict[str, Any]:
        found = logs.select(
            await cluster.logs(sandbox_id),
            since=moment(cursor),
            backward=direction == "backward",
            level=level,
            search=search,
            limit=limit,
        )
        return {"logs": [schemas.log_entry(entry) for entry in found]}

    @router.get("/sandboxes/{sandbox_id}/inspect")
    async def inspect(sandbox_id: str) -> dict[str, Any]:
        return await cluster.inspect(sandbox_id)

    @router.get("/sandboxes/{sandbox_id}/console")
    async def console(
        sandbox_id: str, lines: Annotated[int, Query(ge=1, le=10_000)] = 200
    ) -> dict[str, Any]:
        return {"lines": list(await cluster.console(sandbox_id, lines))}

    @router.api_route(
        "/sandboxes/{sandbox_id}/{verb:path}",
        methods=["GET", "POST", "PUT", "DELETE", "PATCH"],
        include_in_schema=False,
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
