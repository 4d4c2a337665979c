"""Requests for a sandbox that sleeps: refused, or held until it is awake."""

import asyncio
import contextlib
import hashlib
import json

import httpx
import pytest
import websockets
from tests.integration.edge import rig
from tests.integration.edge.rig import ID, PORT, WEBSOCKET_PORT, head, read_head
from tests.integration.edge.test_signed import signed
from tests.integration.edge.test_streams import assert_cut

from agentenv.node.edge import EdgeClient

pytestmark = pytest.mark.usefixtures("guest")
BY_HOST = {"Host": f"{PORT}-{ID}.example.org"}
AGENT = {"E2b-Sandbox-Id": ID}
NOT_FOUND = {"sandboxId": ID, "message": "The sandbox was not found", "code": 502}
MEGABYTE = 1 << 20
LONG = 30.0


@pytest.fixture
async def edge(folder, slot):
    async with rig.edge(folder) as running:
        assert await running.control.sync([slot.asleep()], []) == ()
        yield running


@pytest.fixture
async def news(edge):
    """A connection of its own, as the server has."""
    client = EdgeClient(edge.folder / "control.sock")
    yield client
    await client.close()


@contextlib.asynccontextmanager
async def going_on(coroutine):
    """A call under way, given up at the end if it still is."""
    task = asyncio.ensure_future(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_is_held_and_told_of_and_served_once_awake(edge, http, news, slot):
    async with going_on(http.get("/seen?x", headers=BY_HOST)) as request:
        version, ids = await news.wakes(-1, LONG)
        assert ids == [ID]
        assert await news.wakes(version, 0) == (version, [])
        assert not request.done()
        await edge.control.put(slot.route(generation=2))
        reply = await request
    assert reply.status_code == 200
    assert reply.json()["raw"].startswith("GET /seen?x HTTP/1.1\r\n")
    assert await news.wakes(-1, 0) == (version, [])
    assert (await edge.all_ended(ID)).requests == 1


async def test_many_requests_wake_it_once(edge, http, news, slot):
    requests = [http.post("/echo", headers=BY_HOST, content=b"%d" % n) for n in range(50)]
    async with going_on(asyncio.gather(*requests)) as all_of_them:
        version, ids = await news.wakes(-1, LONG)
        await edge.under_way(50)
        assert ids == [ID]
        assert await news.wakes(version, 0) == (version, [])
        await edge.control.put(slot.route())
        replies = await all_of_them
    assert [reply.content for reply in replies] == [b"%d" % n for n in range(50)]


async def test_who_waits_for_news_is_told_at_once_and_a_newcomer_of_all(edge, http, news, slot):
    other = "z" * 20
    await edge.control.put(slot.asleep(id=other))
    async with going_on(http.get("/seen", headers=BY_HOST)):
        version, _ = await news.wakes(-1, LONG)
        async with (
            going_on(news.wakes(version, LONG)) as waiting,
            going_on(http.get("/seen", headers={"E2b-Sandbox-Id": other})),
        ):
            assert await waiting == (version + 1, [other])
            newcomer = EdgeClient(edge.folder / "control.sock")
            assert set((await newcomer.wakes(-1, 0))[1]) == {ID, other}
            await newcomer.close()


async def test_a_websocket_waits(edge, news, slot):
    url = f"ws://127.0.0.1:{edge.port}/chat"
    names = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": str(WEBSOCKET_PORT)}
    connecting = websockets.connect(url, additional_headers=names, open_timeout=LONG)
    async with going_on(connecting.__aenter__()) as opening:
        assert (await news.wakes(-1, LONG))[1] == [ID]
        await edge.control.put(slot.route())
        socket = await opening
        await socket.send("hello")
        assert await socket.recv() == "hello"
        await socket.close()
    await edge.all_ended(ID)


@pytest.mark.parametrize("chunked", [True, False])
async def test_an_upload_is_held_in_the_client_and_arrives_whole(edge, http, news, slot, chunked):
    size, piece, sent = 50 * MEGABYTE, bytes(range(256)) * 4096, 0

    async def pieces():
        nonlocal sent
        while sent < size:
            sent += len(piece)
            yield piece

    headers = BY_HOST | ({} if chunked else {"Content-Length": str(size)})
    before = edge.rss()
    async with going_on(http.post("/seen", headers=headers, content=pieces())) as request:
        assert (await news.wakes(-1, LONG))[1] == [ID]
        held, earlier = sent, -1
        while held != earlier:  # until nothing moves any more
            await asyncio.sleep(0.2)
            held, earlier = sent, held
        assert held < 16 * MEGABYTE
        assert edge.rss() < before + 4 * MEGABYTE
        await edge.control.put(slot.route())
        seen = (await request).json()
    assert seen["body"] == size
    assert seen["sha256"] == hashlib.sha256(piece * (size // len(piece))).hexdigest()


async def test_who_waits_to_be_told_to_continue_is_told_then(edge, news, slot):
    reader, writer = await edge.connect()
    writer.write(head("/seen", "Content-Length: 3", "Expect: 100-continue", method="POST"))
    await news.wakes(-1, LONG)
    await edge.control.put(slot.route())
    assert (await read_head(reader))[0] == 100
    writer.write(b"abc")
    assert (await read_head(reader))[0] == 200
    writer.close()


async def test_one_that_is_dropped_meanwhile_is_not_found(edge, http, news):
    async with going_on(http.post("/seen", headers=BY_HOST, content=b"x")) as request:
        await news.wakes(-1, LONG)
        assert await edge.control.drop(ID)
        reply = await request
    assert (reply.status_code, reply.json()) == (502, NOT_FOUND)
    assert not await edge.control.wake_failed(ID, "gone")


async def test_one_that_may_not_be_woken_any_more_is_not_found(edge, http, news, slot):
    async with going_on(http.get("/seen", headers=BY_HOST)) as request:
        await news.wakes(-1, LONG)
        await edge.control.put(slot.asleep(wakes=False))
        reply = await request
    assert (reply.status_code, reply.json()) == (502, NOT_FOUND)


async def test_a_failure_is_told_and_the_next_request_tries_again(edge, http, news, slot):
    version = -1
    for _ in range(2):
        async with going_on(http.get("/seen", headers=BY_HOST)) as request:
            version, ids = await news.wakes(version, LONG)
            assert ids == [ID]
            assert await edge.control.wake_failed(ID, "no room")
            reply = await request
        message = "The sandbox is paused and could not be resumed: no room"
        assert reply.status_code == 502
        assert reply.json() == {"sandboxId": ID, "message": message, "code": 502}
    await edge.control.put(slot.route())
    assert (await http.get("/seen", headers=BY_HOST)).status_code == 200


async def test_the_wait_has_an_end(folder, slot):
    async with rig.edge(folder, wake_wait=0.1) as impatient:
        await impatient.control.sync([slot.asleep()], [])
        async with httpx.AsyncClient(base_url=impatient.url) as http:
            reply = await http.get("/seen", headers=BY_HOST)
        assert (reply.status_code, reply.json()["code"]) == (504, 504)
        assert reply.json()["sandboxId"] == ID
        assert (await impatient.control.wakes(-1, 0))[1] == []


async def test_a_client_that_leaves_is_forgotten(edge, news, slot):
    _, writer = await edge.connect()
    writer.write(head("/seen"))
    await news.wakes(-1, LONG)
    writer.close()
    assert (await edge.all_ended(ID)).requests == 1
    assert (await news.wakes(-1, 0))[1] == []
    _, writer = await edge.connect()
    writer.write(head("/seen", "Content-Length: 9", method="POST") + b"half")
    await news.wakes(-1, LONG)
    writer.close()
    await edge.control.put(slot.route())
    assert (await edge.all_ended(ID)).requests == 2


async def test_what_is_refused_does_not_wake(edge, http, slot):
    secure = {"public": False, "traffic_token": "secret", "access_token": "token"}
    await edge.control.put(slot.asleep(**secure))
    preflight = {"Origin": "http://a", "Access-Control-Request-Method": "PUT"}
    right = {"E2b-Traffic-Access-Token": "secret"}
    expired = signed("a.txt", "read", "token", until=1)
    for method, path, headers, status in (
        ("GET", "/seen", BY_HOST, 403),
        ("GET", "/seen", BY_HOST | {"E2b-Traffic-Access-Token": "guess"}, 403),
        ("OPTIONS", "/seen", BY_HOST | right | preflight, 502),
        ("POST", "/init", AGENT, 403),
        ("GET", "/health", AGENT, 502),
        ("POST", "/process.Process/Start", AGENT, 401),
        ("POST", "/process.Process/Start", AGENT | {"X-Access-Token": "guess"}, 401),
        ("GET", f"/files?{httpx.QueryParams(expired)}", {}, 401),
        ("GET", "/seen", AGENT | {"E2b-Sandbox-Port": "x"}, 400),
    ):
        reply = await http.request(method, path, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (status, status), (path, headers)
    assert (await edge.control.wakes(-1, 0))[1] == []
    assert (await edge.control.stats()).sandboxes[ID].requests == 0


async def test_the_right_token_wakes_and_is_looked_at_again(edge, http, news, slot):
    await edge.control.put(slot.asleep(public=False, traffic_token="secret"))
    right = BY_HOST | {"E2b-Traffic-Access-Token": "secret"}
    for token, status in (("secret", 200), ("another", 403)):
        async with going_on(http.get("/seen", headers=right)) as request:
            assert (await news.wakes(-1, LONG))[1] == [ID]
            await edge.control.put(slot.route(public=False, traffic_token=token))
            reply = await request
        assert reply.status_code == status
        assert "secret" not in reply.text
        await edge.control.put(slot.asleep(public=False, traffic_token="secret"))


async def test_one_that_does_not_wake_is_not_found(edge, http, slot):
    await edge.control.put(slot.asleep(wakes=False))
    for path, headers in (("/seen", BY_HOST), ("/health", AGENT), ("/init", AGENT)):
        reply = await http.get(path, headers=headers)
        assert (reply.status_code, reply.json()) == (502, NOT_FOUND)
    assert list((await edge.control.stats()).sandboxes) == [ID]


@pytest.mark.parametrize("wakes", [True, False])
async def test_falling_asleep_cuts_what_is_open(edge, http, slot, wakes):
    await edge.control.put(slot.route())
    reader, writer = await edge.connect()
    writer.write(head("/events"))
    assert (await read_head(reader))[0] == 200
    silent, other = await edge.connect()
    other.write(head("/silent"))
    await edge.under_way(2)
    await edge.control.put(slot.asleep(wakes=wakes))
    await assert_cut(reader)
    status, headers = await read_head(silent)
    assert status == 502
    assert json.loads(await silent.readexactly(int(headers["content-length"]))) == NOT_FOUND
    for stream in (writer, other):
        stream.close()
    assert (await edge.all_ended(ID)).requests == 2  # the account goes on


async def test_telling_the_same_again_disturbs_nobody(edge, http, news, slot):
    async with going_on(http.get("/seen", headers=BY_HOST)) as request:
        version, _ = await news.wakes(-1, LONG)
        await edge.control.put(slot.asleep(generation=5))
        await edge.control.sync([slot.asleep(generation=6)], [])
        assert await news.wakes(-1, 0) == (version, [ID])
        assert not request.done()
        await edge.control.sync([slot.route(generation=7)], [])
        assert (await request).status_code == 200


async def test_a_drain_sends_who_is_held_to_the_successor(edge, http, news):
    async with going_on(http.get("/seen", headers=BY_HOST)) as request:
        await news.wakes(-1, LONG)
        edge.terminate()
        reply = await request
    assert (reply.status_code, reply.headers["should-retry"]) == (503, "true")
    assert await edge.child.wait() == 0
