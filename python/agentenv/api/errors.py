"""Errors to HTTP answers: ``{"code": <status>, "message": ..., "error_code": ...}`` (E2B.md §1)."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from agentenv.errors import AgentEnvError, InfraError

log = logging.getLogger(__name__)

BUSY = 503
REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")
NO_RETRY = {"Should-Retry": "false"}


def body(status: int, message: str, error_code: str, **details: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"code": status, "message": message, "error_code": error_code}
    if details:
        answer["details"] = details
    return answer


def retry(request: Request, status: int) -> dict[str, str]:
    """Whether an SDK may send the request again on its own; it obeys (E2B.md §1).

    A request that may have had effects must not be repeated; one that asks, or says the whole
    of what shall be, or carries an idempotency key, may, once the trouble is likely to be over.
    """
    if status != BUSY:
        return NO_RETRY
    if request.method in REPEATABLE or "idempotency-key" in request.headers:
        return {"Should-Retry": "true", "Retry-After": "1"}
    return NO_RETRY


def install(app: FastAPI) -> None:
    """Answer every error of ours, of validation and of routing in one shape."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, AgentEnvError)
        if isinstance(error, InfraError):
            log.error("%s: %s", error.code, error.message)
        answer = body(error.http_status, error.message, error.code, **error.details)
        return JSONResponse(
            jsonable_encoder(answer), error.http_status, retry(request, error.http_status)
        )

    async def invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return JSONResponse(body(400, f"{where}: {first['msg']}", "invalid_request"), 400)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"no such route: {request.method} {request.url.path}"
        return JSONResponse(body(error.status_code, message, "http"), error.status_code)

    async def bug(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        message = "internal error; the server's log has the details"
        return JSONResponse(body(500, message, "internal"), 500, NO_RETRY)

    app.add_exception_handler(AgentEnvError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)
