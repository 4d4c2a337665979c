"""The HTTP face: E2B.md §5. Parses, calls, answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .contexts import Contexts, Execution, NotThere
from .environment import Environment
from .kernel import KernelFailed


def application(home: Path, environment: Environment | None = None) -> Starlette:
    """Answers once Python's own context is ready. ``home``: where contexts begin."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as tasks:
            contexts = Contexts(tasks, home)
            app.state.contexts = contexts
            app.state.environment = environment or Environment()
            try:
                await contexts.start()
                yield
            finally:
                await contexts.close()

    routes = [
        Route("/health", _health),
        Route("/execute", _execute, methods=["POST"]),
        Route("/contexts", _create, methods=["POST"]),
        Route("/contexts", _list),
        Route("/contexts/{id}", _remove, methods=["DELETE"]),
        Route("/contexts/{id}/restart", _restart, methods=["POST"]),
    ]
    refusals = {NotThere: _refused, BadRequest: _refused, KernelFailed: _refused}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=cast("Any", refusals))


class BadRequest(Exception):
    """The body is not what it should be; in words for the user."""


_STATUS: Mapping[type[Exception], int] = {NotThere: 404, BadRequest: 400, KernelFailed: 500}


async def _refused(_request: Request, error: Exception) -> Response:
    status = _STATUS[type(error)]
    return JSONResponse({"code": status, "message": str(error)}, status)


async def _health(_request: Request) -> Response:
    return PlainTextResponse("OK")


async def _execute(request: Request) -> Response:
    body = await _body(request)
    contexts, environment = _contexts(request), request.app.state.environment
    own = await environment.variables(request.headers.get("x-access-token"))
    execution = await contexts.execute(
        _word(body, "code") or "",
        _word(body, "context_id"),
        _word(body, "language"),
        {**own, **_variables(body)},
    )
    return EventStream(execution, contexts)


async def _create(request: Request) -> Response:
    body = await _body(request)
    contexts = _contexts(request)
    context = await contexts.create(_word(body, "language"), _word(body, "cwd"))
    return JSONResponse(context.shown())


async def _list(request: Request) -> Response:
    return JSONResponse([context.shown() for context in _contexts(request).all()])


async def _remove(request: Request) -> Response:
    await _contexts(request).remove(request.path_params["id"])
    return Response(status_code=204)


async def _restart(request: Request) -> Response:
    await _contexts(request).find(request.path_params["id"]).restart()
    return Response(status_code=204)


class EventStream(Response):
    """An execution's events, one JSON object a line. A client that leaves interrupts it."""

    def __init__(self, execution: Execution, contexts: Contexts) -> None:
        super().__init__(media_type="application/x-ndjson")
        self._execution, self._contexts = execution, contexts
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            async with asyncio.TaskGroup() as group:
                pump = group.create_task(self._pump(send))
                watch = group.create_task(_until_gone(receive))
                await asyncio.wait([pump, watch], return_when=asyncio.FIRST_COMPLETED)
                pump.cancel()
                watch.cancel()
        finally:
            self._contexts.leave(self._execution)

    async def _pump(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for event in self._execution.events():
            line = json.dumps(event, default=str).encode() + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _contexts(request: Request) -> Contexts:
    return request.app.state.contexts


async def _body(request: Request) -> Mapping[str, Any]:
    """A JSON object; none at all is an empty one."""
    try:
        found: Any = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest("the body is no JSON object")
    return cast("Mapping[str, Any]", found)


def _word(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if not isinstance(value, str | None):
        raise BadRequest(f"{name} is no string")
    return value


def _variables(body: Mapping[str, Any]) -> Mapping[str, str]:
    found: Any = body.get("env_vars") or {}
    if not isinstance(found, dict):
        raise BadRequest("env_vars is no object")
    pairs = cast("Mapping[str, Any]", found)
    return {name: str(value) for name, value in pairs.items() if value is not None}
