"""Requests made from our OpenAPI document: each gets a documented answer, none breaks the server."""

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from agentenv.api.app import create_app
from agentenv.errors import UserError

KEY = "e2b_" + "0" * 40
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
]  # fmt: skip
# The next operations reach for registries, or take away what other tests use.
CHANGING = ("/v2/sandboxes", "/sandboxes", "/templates/{key}")
PLENTY = settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


class Unwilling:
    """A cluster, and its templates, that refuses everything: what is left is what HTTP makes of the request."""

    def __getattr__(self, name):
        async def refuse(*_args, **_options):
            raise UserError(f"{name} is not done here", code="refused")

        return refuse


def each_operation(document, key):
    """Ask every operation with made-up requests; what no check accepts fails the test."""
    asked = 0
    for found in document.get_all_operations():
        operation = found.ok()
        asked += 1

        @PLENTY
        @given(case=operation.as_strategy())
        def ask(case):
            case.headers = {**(case.headers or {}), "X-API-Key": key}
            case.call_and_validate(checks=CHECKS)

        ask()
    return asked


def test_any_request_gets_a_documented_answer():
    app = create_app(Unwilling(), Unwilling(), key=KEY, node="n000", domain=None)
    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    assert each_operation(document, KEY) > 20


def test_a_running_server_answers_as_documented(server):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    document = document.exclude(method="POST", path=list(CHANGING))
    document = document.exclude(method="DELETE", path="/templates/{key}")
    assert each_operation(document, server.key) > 15
