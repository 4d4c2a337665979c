"""TLS on the listeners: certificates and their renewal, HTTP/1.1 and HTTP/2 inside."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
from pathlib import Path

import h2.events
import httpx
import pytest
import websockets
from tests.integration.edge import http2, rig
from tests.integration.edge.rig import ID, PORT, WEBSOCKET_PORT, head, read_chunk, read_head

pytestmark = pytest.mark.usefixtures("guest")
OTHER = "z" * 20
HOST = f"{PORT}-{ID}.example.org"
BY_HOST = {"Host": HOST}
MEGABYTE = 1 << 20


def certify(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed pair for this machine and for sandboxes of example.org."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    names = "subjectAltName=IP:127.0.0.1,DNS:*.example.org"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    words = ("openssl", "req", "-x509", *kind, "-subj", f"/CN={name}", "-addext", names)
    subprocess.run((*words, "-keyout", key, "-out", cert), check=True, capture_output=True)
    return cert, key


@pytest.fixture
def pair(folder):
    return certify(folder, "first")


@pytest.fixture
def trust(pair):
    return ssl.create_default_context(cafile=pair[0])


@pytest.fixture
async def edge(folder, slot, pair):
    with (folder / "log").open("wb") as log:
        async with rig.edge(folder, api_wait=0.2, tls=pair, stderr=log) as running:
            routes = [slot.route(), slot.route(id=OTHER)]
            assert await running.control.sync(routes, []) == ()
            yield running


@pytest.fixture
async def http(edge, trust):
    async with httpx.AsyncClient(
        base_url=edge.url, timeout=60, verify=trust, limits=httpx.Limits(keepalive_expiry=None)
    ) as client:
        yield client


@pytest.fixture
async def multiplexed(edge, trust):
    async with http2.connect(edge.port, trust) as connection:
        yield connection


async def counts(http) -> dict[str, int]:
    host = {"Host": f"{PORT}-{OTHER}.example.org"}
    return (await http.get("/counts", headers=host)).json()


async def test_http1_inside_tls(http):
    reply = await http.get("/seen", headers=BY_HOST)
    assert reply.http_version == "HTTP/1.1"
    headers = reply.json()["headers"]
    assert (headers["host"], headers["x-forwarded-proto"]) == (HOST, "https")
    body = os.urandom(3 * MEGABYTE)
    assert (await http.post("/echo", headers=BY_HOST, content=body)).content == body
    gone = await http.get("/", headers={"E2b-Sandbox-Id": "y" * 20})
    assert gone.status_code == 502


async def test_http2_for_an_ordinary_client(edge, trust):
    async with httpx.AsyncClient(
        base_url=edge.url, timeout=60, verify=trust, http2=True, headers=BY_HOST
    ) as many:

        async def one(number: int) -> bool:
            body = f"{number}".encode() * 1000
            reply = await many.post("/echo", content=body)
            return (reply.http_version, reply.content) == ("HTTP/2", body)

        assert all(await asyncio.gather(*(one(n) for n in range(300))))
        size = 32 * MEGABYTE
        assert (await many.post("/seen", content=b"u" * size)).json()["body"] == size
        assert len((await many.get(f"/bytes?{size}")).content) == size
    assert (await edge.all_ended(ID)).requests == 302
    assert edge.rss() < 64 * MEGABYTE


async def test_curl_speaks_http2(edge, pair):
    words = ("curl", "-sS", "--http2", "--cacert", str(pair[0]), "--data-binary", "@-")
    to = ("--resolve", f"{HOST}:{edge.port}:127.0.0.1", f"https://{HOST}:{edge.port}/seen")
    child = await asyncio.create_subprocess_exec(
        *words, "-w", "\n%{http_version}", *to, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(child.communicate(b"x" * MEGABYTE), 20)
    seen, version = out.decode().rsplit("\n", 1)
    assert version == "2"
    assert json.loads(seen)["body"] == MEGABYTE


async def test_what_the_guest_sees_of_http2(multiplexed):
    crumbs = (("cookie", "a=1"), ("cookie", "b=2"))
    stream = multiplexed.request(HOST, "/seen?x=%20", *crumbs, ("te", "trailers"))
    assert (await multiplexed.head(stream))[":status"] == "200"
    seen = json.loads(await multiplexed.body(stream))
    assert seen["raw"].startswith("GET /seen?x=%20 HTTP/1.1\r\n")
    headers = seen["headers"]
    assert (headers["host"], headers["cookie"]) == (HOST, "a=1; b=2")
    assert (headers["te"], headers["x-forwarded-proto"]) == ("trailers", "https")
    assert "transfer-encoding" not in headers


async def test_a_body_of_unknown_length_goes_both_ways_at_once(multiplexed):
    stream = multiplexed.request(HOST, "/echo", method="POST", end=False)
    for piece in (b"first", b"x" * 10_000):
        multiplexed.send(stream, piece)
        assert await multiplexed.data(stream, len(piece)) == piece
    multiplexed.send(stream, b"", end=True)
    await multiplexed.next(stream, h2.events.StreamEnded)


async def test_trailers_arrive(multiplexed):
    stream = multiplexed.request(HOST, "/trailers")
    event = await multiplexed.next(stream, h2.events.TrailersReceived)
    assert dict(event.headers) == {"x-sum": "7"}


async def test_lengths_that_differ_do_not_reach_the_guest(multiplexed, http):
    before = (await counts(http))["requests"]
    lengths = (("content-length", "5"), ("content-length", "50"))
    stream = multiplexed.request(HOST, "/seen", *lengths, method="POST", end=False)
    await multiplexed.next(stream, h2.events.StreamReset)
    assert (await counts(http))["requests"] == before + 1


async def test_a_drop_cuts_the_streams_of_one_sandbox_only(multiplexed, edge, http):
    other = f"{PORT}-{OTHER}.example.org"
    echoes = [multiplexed.request(h, "/echo", method="POST", end=False) for h in (HOST, other)]
    for stream in echoes:
        multiplexed.send(stream, b"x")
        assert await multiplexed.data(stream, 1) == b"x"
    stalled = multiplexed.request(HOST, f"/bytes?{256 * MEGABYTE}")
    multiplexed.held.add(stalled)
    await multiplexed.head(stalled)
    silent = multiplexed.request(HOST, "/silent")
    async with asyncio.timeout(10):
        while (await edge.control.stats()).sandboxes[ID].active < 3:
            await asyncio.sleep(0.01)
    before = await counts(http)
    await edge.control.drop(ID)
    await multiplexed.next(echoes[0], h2.events.StreamReset)
    # The one that had no head yet can still be told.
    assert (await multiplexed.head(silent))[":status"] == "502"
    assert json.loads(await multiplexed.body(silent))["message"] == "The sandbox was not found"
    async with asyncio.timeout(10):  # also the one whose client does not read
        while (await counts(http))["ended"] < before["ended"] + 3:
            await asyncio.sleep(0.01)
    multiplexed.release(stalled)
    await multiplexed.next(stalled, h2.events.StreamReset)
    multiplexed.send(echoes[1], b"y", end=True)
    assert await multiplexed.body(echoes[1]) == b"y"


async def test_a_stream_that_its_client_resets_is_noticed(multiplexed, http, edge):
    before = (await counts(http))["left_early"]
    stream = multiplexed.request(HOST, "/events")
    assert await multiplexed.data(stream, 13) == b"data: first\n\n"
    multiplexed.h2.reset_stream(stream)
    multiplexed.flush()
    async with asyncio.timeout(10):
        while (await counts(http))["left_early"] == before:
            await asyncio.sleep(0.01)
    await edge.all_ended(ID)


async def test_a_drop_resets_a_connection_of_http1(edge, trust):
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, ssl=trust)
    writer.write(head("/events"))
    await read_head(reader)
    await read_chunk(reader)
    await edge.control.drop(ID)
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_a_websocket_inside_tls(edge, trust):
    names = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": str(WEBSOCKET_PORT)}
    url = f"wss://127.0.0.1:{edge.port}/chat"
    async with websockets.connect(
        url, ssl=trust, additional_headers=names, max_size=None, compression=None
    ) as socket:
        for message in ("hello", b"\x00" * 5 * MEGABYTE):
            await socket.send(message)
            assert await socket.recv() == message


async def test_the_drain_lets_streams_finish(edge, pair):
    """By curl: the Python library takes the first word of an end for the end."""
    to = ("--resolve", f"{HOST}:{edge.port}:127.0.0.1", f"https://{HOST}:{edge.port}/echo")
    words = ("curl", "-sS", "-N", "--http2", "--cacert", str(pair[0]), "-X", "POST", "-T", ".", *to)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = await asyncio.create_subprocess_exec(*words, **pipes)
    child.stdin.write(b"x")
    assert await asyncio.wait_for(child.stdout.read(1), 10) == b"x"
    edge.terminate()
    async with asyncio.timeout(10):
        while (edge.folder / "control.sock").exists():
            await asyncio.sleep(0.01)
    child.stdin.write(b"y")
    assert await asyncio.wait_for(child.stdout.read(1), 10) == b"y"
    child.stdin.close()
    assert await asyncio.wait_for(child.wait(), 10) == 0
    assert await asyncio.wait_for(edge.child.wait(), 4) == 0


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
async def test_a_handshake_that_does_not_come_is_not_waited_for(edge, words):
    reader, writer = await edge.connect()
    writer.write(words)
    with contextlib.suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 25)
    writer.close()


async def presented(edge) -> str:
    """The name in the certificate that the edge shows."""
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", edge.port, ssl=blind)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return "second" if b"second" in der else "first"


async def test_a_renewed_pair_is_taken_and_a_damaged_one_is_not(edge, http, folder, pair):
    assert (await http.get("/seen", headers=BY_HOST)).status_code == 200
    second = certify(folder, "second")
    second[1].replace(pair[1])
    pair[0].write_text("no certificate")
    async with asyncio.timeout(30):
        while b"stays in use" not in (folder / "log").read_bytes():
            await asyncio.sleep(0.2)
    assert await presented(edge) == "first"
    second[0].replace(pair[0])
    async with asyncio.timeout(30):
        while await presented(edge) != "second":
            await asyncio.sleep(0.2)
    assert (await http.get("/seen", headers=BY_HOST)).status_code == 200  # on its old connection
    assert str(pair[0]) in (folder / "log").read_text()


@pytest.mark.parametrize("damage", ["missing", "empty", "of another"])
async def test_a_pair_that_cannot_be_used_is_said_at_the_start(folder, pair, damage):
    cert, key = pair
    if damage == "missing":
        cert.unlink()
    elif damage == "empty":
        key.write_text("")
    else:
        key = certify(folder, "other")[1]
    words = rig.argv(folder, tls=(cert, key))
    async with rig.process(*words, stderr=asyncio.subprocess.PIPE) as child:
        assert await asyncio.wait_for(child.wait(), 10) == 71
        told = (await child.stderr.read()).decode()
    assert str(folder) in told


async def test_half_a_pair_is_no_command_line(folder, pair):
    words = rig.argv(folder, tls=pair)[:-2]
    async with rig.process(*words, stderr=asyncio.subprocess.PIPE) as child:
        assert await asyncio.wait_for(child.wait(), 10) == 64
        assert b"--tls-key" in await child.stderr.read()
