"""Reads through other nodes: with the store dead, with a wrong token, from peers that lie or hang."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.blocks import Layer, Store, block_server, noise, settled
from tests.s3 import free_port

BLOCKS = 256


@pytest.fixture
def token(folder: Path) -> Path:
    path = folder / "token"
    path.write_text("a secret of the nodes\n")
    return path


@pytest.fixture
def layer(store: Store) -> Layer:
    return store.write(noise(1, BLOCKS), BLOCKS, 32)


async def warm(server: Any, layer: Layer) -> None:
    path, wanted = await server.open([layer], "warm")
    assert await asyncio.to_thread(path.read_bytes) == wanted
    await settled(server)


async def test_a_warm_peer_stands_in_for_a_dead_store(
    folder: Path, store: Store, layer: Layer, token: Path
):
    port = free_port()
    listens = {"peer_listen": f"127.0.0.1:{port}", "peer_token": token}
    asks = {"peers": (f"http://127.0.0.1:{port}",), "peer_token": token, "patience": 3.0}
    async with (
        block_server(folder, store.url, "warm", **listens) as peer,
        block_server(folder, store.url, "cold", **asks) as cold,
    ):
        await warm(peer, layer)
        path, wanted = await cold.open([layer])
        store.file("pack", layer.pack or "").unlink()
        assert await asyncio.to_thread(path.read_bytes) == wanted
        stats = await settled(cold)
        assert stats["fetch"]["peer_bytes"] == len(wanted)
        assert stats["fetch"]["fetched_bytes"] == 0
        # A closed layer is answered for as well.
        await peer.client.close("warm")
        cold.end()
        for data in cold.cached("data"):
            data.unlink()
        await cold.start()
        assert await asyncio.to_thread(path.read_bytes) == wanted
        assert (await peer.client.stats())["open_layers"] == 0


async def test_a_wrong_token_gets_nothing(folder: Path, store: Store, layer: Layer, token: Path):
    port = free_port()
    wrong = folder / "wrong"
    wrong.write_text("guessed")
    listens = {"peer_listen": f"127.0.0.1:{port}", "peer_token": token}
    asks = {"peers": (f"http://127.0.0.1:{port}",), "peer_token": wrong}
    async with (
        block_server(folder, store.url, "warm", **listens) as peer,
        block_server(folder, store.url, "cold", **asks) as cold,
    ):
        await warm(peer, layer)
        path, wanted = await cold.open([layer])
        assert await asyncio.to_thread(path.read_bytes) == wanted
        fetched = (await settled(cold))["fetch"]
        assert fetched["peer_bytes"] == 0 and fetched["fetched_bytes"] > 0
        for request in (b"GET / HTTP/1.1\r\n\r\n", b"GET /chunks/x/1 HTTP/1.1\r\nhost: a\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(request)
                assert b" 401 " in connection.recv(1000).split(b"\r\n")[0]


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def false_peer(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """A peer that answers so; its address and what it was asked."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answer(self)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _body(handler: BaseHTTPRequestHandler, data: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def _numbers(handler: BaseHTTPRequestHandler) -> list[int]:
    return [int(number) for number in handler.path.rpartition("/")[2].split(",")]


def wrong_bytes(handler: BaseHTTPRequestHandler) -> None:
    size = 32 * 4096
    parts = [struct.pack("<II", n, size) + os.urandom(size) for n in _numbers(handler)]
    _body(handler, b"".join(parts))


def noise_only(handler: BaseHTTPRequestHandler) -> None:
    _body(handler, os.urandom(5000))


def other_chunks(handler: BaseHTTPRequestHandler) -> None:
    _body(handler, struct.pack("<II", 2**32 - 1, 4096) + bytes(4096))


def huge_length(handler: BaseHTTPRequestHandler) -> None:
    _body(handler, struct.pack("<II", _numbers(handler)[0], 2**32 - 1))


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(bytes(1 << 20))
    except OSError:
        pass


def failing(handler: BaseHTTPRequestHandler) -> None:
    _body(handler, b"", 500)


def hanging(handler: BaseHTTPRequestHandler) -> None:
    handler.rfile.read(1)  # until the other one leaves


def hanging_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


@pytest.mark.parametrize(
    "answer",
    [wrong_bytes, noise_only, other_chunks, huge_length, endless, failing, hanging, hanging_up],
)
async def test_a_bad_peer_does_no_harm(
    folder: Path, store: Store, layer: Layer, token: Path, answer: Answer
):
    with false_peer(answer) as (url, asked):
        async with block_server(folder, store.url, peers=(url,), peer_token=token) as server:
            path, wanted = await server.open([layer])
            assert await asyncio.to_thread(path.read_bytes) == wanted
            fetched = (await settled(server))["fetch"]
            assert asked and fetched["peer_bytes"] == 0
            assert (fetched["damaged_chunks"] > 0) == (answer is wrong_bytes)


async def test_off_means_no_traffic(folder: Path, store: Store, layer: Layer):
    async with block_server(folder, store.url) as server:
        await warm(server, layer)
        assert not _listening(server.pid)


def _listening(pid: int) -> set[str]:
    """Inodes of the listening TCP sockets of a process."""
    ends = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    found = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[3] == "0A"}
    return found & ends
