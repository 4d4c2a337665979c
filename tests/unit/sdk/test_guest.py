"""Who must act, by what a guest or the node says."""

import pytest

from agentenv.errors import Conflict, GuestError, InfraError, NotFound, UserError
from agentenv.sdk.client import Address, Client
from agentenv.sdk.guest import Guest, _ended, fault


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("not_found", NotFound),
        ("already_exists", Conflict),
        ("invalid_argument", UserError),
        ("unauthenticated", UserError),
        ("internal", GuestError),
        ("disk_full", GuestError),
        ("new_in_a_later_version", GuestError),
    ],
)
def test_refusals(code, kind):
    assert type(fault({"code": code, "message": "m"})) is kind


@pytest.mark.parametrize(
    ("cause", "kind", "code"),
    [
        ("panic", GuestError, "guest_died"),
        ("out_of_memory", GuestError, "guest_died"),
        ("killed", InfraError, "machine_failed"),
        ("failed", InfraError, "machine_failed"),
        ("stopped", NotFound, "sandbox_not_found"),
        (None, NotFound, "sandbox_not_found"),
    ],
)
def test_deaths(cause, kind, code):
    details = {"cause": {"kind": cause, "reason": "because"}} if cause else {}
    error = _ended("x", NotFound("gone", code="sandbox_not_found", **details))
    assert type(error) is kind and error.code == code
    assert cause in (None, "stopped") or "because" in error.message


async def test_no_server_is_the_nodes_trouble():
    async with Client(Address("http://127.0.0.1:9", "k")) as client:
        with pytest.raises(InfraError) as caught:
            await Guest(client, {"sandboxID": "x"}).call("process.Process/List", {})
    assert caught.value.code == "server_unreachable"
