"""Signed URLs of files without a word about the sandbox: found by the token that signed them."""

import asyncio
import hashlib
from base64 import b64encode

import pytest
from tests.integration.edge import rig
from tests.integration.edge.rig import AGENT_PORT, ID
from tests.integration.edge.test_api import api_server

OTHER = "z" * 20
TOKENS = {ID: "token one", OTHER: "token two"}


@pytest.fixture
async def agent(slot):
    async with rig.guest_server(slot, AGENT_PORT) as server:
        yield server


@pytest.fixture
async def signers(agent, edge, slot):
    routes = [slot.route(id=name, access_token=token) for name, token in TOKENS.items()]
    assert await edge.control.sync([*routes, slot.route(id="y" * 20)], []) == ()


def signed(path: str, operation: str, token: str, user: str = "", until: int | None = None):
    """The query of a signed URL, made by the rule of the SDK."""
    parts = (path, operation, user, token, *([str(until)] if until is not None else []))
    digest = hashlib.sha256(":".join(parts).encode()).digest()
    query = {"path": path, "signature": "v1_" + b64encode(digest).decode().rstrip("=")}
    query |= {"username": user} if user else {}
    return query | ({"signature_expiration": str(until)} if until is not None else {})


@pytest.mark.usefixtures("signers")
@pytest.mark.parametrize("name", [ID, OTHER])
@pytest.mark.parametrize(
    ("method", "path", "user", "until"),
    [
        ("GET", "a.txt", "", None),
        ("POST", "/home/ü b+c&d%41:e", "some user", 4_000_000_000),
        ("GET", "a.txt", "root", 1),  # expired: the agent tells
    ],
)
async def test_the_signer_gets_it_unchanged(http, edge, name, method, path, user, until):
    operation = "read" if method == "GET" else "write"
    query = signed(path, operation, TOKENS[name], user, until)
    reply = await http.request(method, "/files", params=query)
    assert reply.status_code == 200
    target = reply.request.url.raw_path.decode()
    assert reply.json()["raw"].startswith(f"{method} {target} HTTP/1.1\r\n")
    sandboxes = (await edge.control.stats()).sandboxes
    assert [n for n, traffic in sandboxes.items() if traffic.requests] == [name]


@pytest.mark.usefixtures("signers")
async def test_what_nobody_signed_is_refused(http):
    right = signed("a.txt", "read", TOKENS[ID])
    wrong = (
        signed("a.txt", "write", TOKENS[ID]),
        signed("a.txt", "read", "guess"),
        signed("a.txt", "read", ""),
        right | {"path": "b.txt"},
        right | {"signature_expiration": "4000000000"},
        right | {"signature": ""},
    )
    for query in wrong:
        reply = await http.get("/files", params=query)
        assert reply.status_code == 401
        assert reply.json() == {"code": 401, "message": "invalid signature"}


async def test_before_the_truth_is_known(folder, slot):
    async with rig.edge(folder) as fresh:
        reader, writer = await fresh.connect()
        writer.write(b"GET /files?path=a&signature=v1_x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await rig.read_head(reader))[0] == 503
        writer.close()


@pytest.mark.usefixtures("signers")
async def test_all_other_paths_are_for_the_api(http, edge):
    query = signed("a.txt", "read", TOKENS[ID])
    async with api_server(edge.api):
        assert (await http.get("/files", params={"path": "a.txt"})).status_code == 200
        assert (await http.get("/seen", params=query)).status_code == 200
    sandboxes = (await edge.control.stats()).sandboxes
    assert not any(traffic.requests for traffic in sandboxes.values())


@pytest.mark.usefixtures("signers")
async def test_a_token_that_was_withdrawn_opens_nothing(http, edge, slot):
    query = signed("a.txt", "read", TOKENS[ID])
    await edge.control.put(slot.route(access_token=None))
    assert (await http.get("/files", params=query)).status_code == 401


@pytest.mark.usefixtures("signers")
async def test_the_signer_is_woken_and_nobody_else(http, edge, slot):
    for name, token in TOKENS.items():
        await edge.control.put(slot.asleep(id=name, access_token=token))
    query = signed("a.txt", "read", TOKENS[OTHER], until=4_000_000_000)
    request = asyncio.ensure_future(http.get("/files", params=query))
    assert (await edge.control.wakes(-1, 20))[1] == [OTHER]
    await edge.control.put(slot.route(id=OTHER, access_token=TOKENS[OTHER]))
    assert (await request).status_code == 200
