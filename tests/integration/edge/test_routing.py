"""Who gets a request, who is refused, and what the next hop sees of it."""

import asyncio
import sys

import pytest
from tests.integration.edge import rig
from tests.integration.edge.rig import ID, PORT

from agentenv.errors import InfraError

pytestmark = pytest.mark.usefixtures("guest")
TO_GUEST = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": str(PORT)}
BY_HOST = {"Host": f"{PORT}-{ID}.example.org"}


@pytest.mark.parametrize("naming", [TO_GUEST, BY_HOST, BY_HOST | TO_GUEST])
async def test_both_ways_to_name_a_sandbox(http, naming):
    seen = (await http.get("/seen", headers=naming)).json()
    assert seen["method"] == "GET"
    assert seen["headers"]["host"] == naming.get("Host", http.base_url.netloc.decode())


async def test_what_the_guest_sees(http):
    hop = {"Connection": "x-hop, keep-alive", "X-Hop": "1", "X-End": "1", "Keep-Alive": "timeout=9"}
    seen = (await http.get("/seen?a=%20b", headers=BY_HOST | hop)).json()
    assert seen["raw"].startswith("GET /seen?a=%20b HTTP/1.1\r\n")
    headers = seen["headers"]
    assert headers["x-end"] == "1"
    assert not {"x-hop", "connection", "keep-alive"} & set(headers)
    assert headers["x-forwarded-for"] == "127.0.0.1"
    assert headers["x-forwarded-proto"] == "http"
    assert headers["x-forwarded-host"] == BY_HOST["Host"]


async def test_an_absolute_request_target(edge):
    reader, writer = await edge.connect()
    target = f"http://{PORT}-{ID}.example.org/seen"
    writer.write(f"GET {target} HTTP/1.1\r\nHost: other\r\n\r\n".encode())
    status, headers = await rig.read_head(reader)
    body = await reader.readexactly(int(headers["content-length"]))
    assert status == 200
    assert b"GET /seen HTTP/1.1" in body
    assert f'"host": "{PORT}-{ID}.example.org"'.encode() in body
    writer.close()


async def test_a_closed_port(http):
    reply = await http.get("/", headers={"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "9"})
    assert reply.status_code == 502
    assert reply.json() == {
        "sandboxId": ID,
        "port": 9,
        "message": "The sandbox is running but port is not open",
        "code": 502,
    }


@pytest.mark.parametrize("unknown", ["z" * 20, "debug_sandbox_id", "x"])
async def test_an_unknown_sandbox(http, unknown):
    reply = await http.get("/health", headers={"E2b-Sandbox-Id": unknown})
    assert reply.status_code == 502
    assert reply.json() == {
        "sandboxId": unknown,
        "message": "The sandbox was not found",
        "code": 502,
    }


async def test_before_the_truth_is_known(folder, slot):
    async with rig.edge(folder) as fresh:
        reader, writer = await fresh.connect()
        writer.write(rig.head("/seen"))
        status, headers = await rig.read_head(reader)
        assert (status, headers["should-retry"], headers["retry-after"]) == (503, "true", "1")
        await reader.readexactly(int(headers["content-length"]))
        await fresh.control.put(slot.route())  # one put does not make the rest known
        writer.write(rig.head("/seen"))
        status, headers = await rig.read_head(reader)
        assert status == 200
        writer.close()


@pytest.mark.parametrize("path", ["/init", "/fsfreeze", "//%69nit", "/x/../freeze", "/Init/"])
async def test_internal_paths_are_refused(edge, path):
    reader, writer = await edge.connect()
    writer.write(rig.head(path, "Content-Length: 0", method="POST", port=49983))
    status, headers = await rig.read_head(reader)
    assert (status, headers["content-type"]) == (403, "application/json")
    writer.close()


async def test_internal_paths_are_plain_ones_on_other_ports(http):
    assert (await http.get("/init", headers=BY_HOST)).status_code == 404


async def test_a_port_that_cannot_be(http):
    bad = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "x"}
    reply = await http.get("/", headers=bad)
    assert (reply.status_code, reply.json()["code"]) == (400, 400)


async def test_connect_is_not_offered(edge):
    reader, writer = await edge.connect()
    writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
    assert (await rig.read_head(reader))[0] == 405
    writer.close()


async def test_a_private_sandbox_asks_for_its_token(http, edge, slot):
    await edge.control.put(slot.route(public=False, traffic_token="secret"))
    for wrong in ({}, {"E2b-Traffic-Access-Token": "guess"}):
        reply = await http.get("/seen", headers=BY_HOST | wrong)
        assert (reply.status_code, reply.json()["code"]) == (403, 403)
    right = {"E2b-Traffic-Access-Token": "secret"}
    reply = await http.get("/seen", headers=BY_HOST | right)
    assert reply.status_code == 200
    assert "secret" not in reply.text
    agent = await http.get("/health", headers={"E2b-Sandbox-Id": ID})
    assert "port is not open" in agent.text  # not asked for a token


async def test_a_masked_host(http, edge, slot):
    await edge.control.put(slot.route(mask_host="localhost:${PORT}"))
    seen = (await http.get("/seen", headers=BY_HOST)).json()
    assert seen["headers"]["host"] == f"localhost:{PORT}"
    assert seen["headers"]["x-forwarded-host"] == BY_HOST["Host"]


async def test_a_namespace_that_is_not_there(edge, slot):
    with pytest.raises(InfraError) as caught:
        await edge.control.put(slot.route(netns="/run/netns/edge-no-such"))
    assert caught.value.code == "netns_unavailable"
    bad = slot.route(id="z" * 20, netns="/etc/hostname")
    (failed,) = await edge.control.sync([slot.route(), bad], [])
    assert failed.name == "z" * 20


async def test_a_route_outlives_the_name_of_its_namespace(http, edge):
    with rig.slot() as other:
        async with rig.guest_server(other):
            await edge.control.put(other.route(generation=2))
            rig.ip("netns", "del", other.router)
            assert (await http.get("/seen", headers=BY_HOST)).status_code == 200
            await edge.control.sync([other.route(generation=2)], [])
            assert (await http.get("/seen", headers=BY_HOST)).status_code == 200


async def test_statistics(http, edge):
    await http.post("/seen", headers=BY_HOST, content=b"x" * 1000)
    await http.get("/bytes?5000", headers=BY_HOST)
    stats = await edge.control.stats()
    traffic = stats.sandboxes[ID]
    assert (traffic.requests, traffic.active, traffic.bytes_in) == (2, 0, 1000)
    assert traffic.bytes_out > 5000
    assert traffic.last_activity > 0
    assert stats.connections == 1


async def test_a_plain_file_server(http, slot, folder):
    (folder / "data").write_bytes(b"0123456789" * 100_000)
    words = ("-u", "-m", "http.server", "--bind", rig.GUEST, "8082", "-d", str(folder))
    async with rig.process("ip", "netns", "exec", slot.guest, sys.executable, *words) as child:
        await asyncio.wait_for(child.stdout.readline(), 20)
        reply = await http.get("/data", headers={"Host": f"8082-{ID}.example.org"})
        assert reply.content == b"0123456789" * 100_000
