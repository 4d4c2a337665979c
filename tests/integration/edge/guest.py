"""The server inside the test's sandbox: `guest.py ADDRESS PORT WEBSOCKET_PORT`.

Plain sockets, so that tests see framing as it is on the wire. One behaviour a path.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

import websockets

CHUNK = bytes(range(256)) * 256  # 64 KiB
left_early = 0
connections = 0
ended = 0
requests = 0


async def head_of(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], str] | None:
    try:
        raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw[:-4].split("\r\n")
    method, path, _ = first.split(" ")
    pairs = (line.split(": ", 1) for line in lines)
    return method, path, {name.lower(): value for name, value in pairs}, raw


async def body_of(reader: asyncio.StreamReader, headers: dict[str, str]):
    """Yields the pieces of a body as they come."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
        return
    left = int(headers.get("content-length", 0))
    while left:
        piece = await reader.read(min(left, 65536))
        if not piece:
            return
        left -= len(piece)
        yield piece


def whole(writer, body: bytes, more: str = "") -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    writer.write(head.encode() + body)


def begin(writer, kind: str = "application/octet-stream") -> None:
    head = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: {kind}\r\n\r\n"
    writer.write(head.encode())


def chunk(writer, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def answer(reader, writer, method, path, headers, raw) -> None:
    global left_early
    path, _, query = path.partition("?")
    if path == "/echo":  # each piece goes back as soon as it came
        begin(writer)
        async for piece in body_of(reader, headers):
            chunk(writer, piece)
            await writer.drain()
        chunk(writer, b"")
        return
    pieces = [piece async for piece in body_of(reader, headers)]
    received = sum(map(len, pieces))
    if path in ("/seen", "/files"):
        seen = {"method": method, "headers": headers, "raw": raw, "body": received}
        seen["sha256"] = hashlib.sha256(b"".join(pieces)).hexdigest()
        whole(writer, json.dumps(seen).encode())
    elif path == "/counts":
        counts = {"connections": connections, "ended": ended}
        counts |= {"left_early": left_early, "requests": requests}
        whole(writer, json.dumps(counts).encode())
    elif path == "/trailers":
        begin(writer)
        chunk(writer, b"body")
        writer.write(b"0\r\nX-Sum: 7\r\n\r\n")
    elif path == "/bytes":
        whole_length = int(query)
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {whole_length}\r\n\r\n".encode())
        for start in range(0, whole_length, len(CHUNK)):
            writer.write(CHUNK[: whole_length - start])
            await writer.drain()
    elif path == "/events":  # one now, the next when asked for by the end of the connection
        begin(writer, "text/event-stream")
        chunk(writer, b"data: first\n\n")
        await writer.drain()
        await reader.read(1)
        left_early += 1
    elif path == "/silent":
        await reader.read(1)
        left_early += 1
    elif path == "/cut":
        begin(writer)
        chunk(writer, b"half")
        await writer.drain()
        writer.transport.abort()
    elif path == "/last":
        whole(writer, b"bye", "Connection: close\r\nKeep-Alive: timeout=1\r\n")
        await writer.drain()
        writer.close()
    elif path == "/rude":  # promises to stay and leaves
        whole(writer, b"bye")
        await writer.drain()
        writer.close()
    else:
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    global connections, ended, requests
    connections += 1
    try:
        while head := await head_of(reader):
            requests += 1
            await answer(reader, writer, *head)
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        ended += 1
        writer.close()


async def echo(websocket) -> None:
    async for message in websocket:
        await websocket.send(message)


async def main(address: str, port: int, websocket_port: int) -> None:
    async with (
        await asyncio.start_server(converse, address, port) as server,
        websockets.serve(echo, address, websocket_port, max_size=None, compression=None),
    ):
        print("ready", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
