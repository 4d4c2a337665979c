"""Ports of a sandbox: the name under which its web servers answer, and tunnels for everything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from agentenv.concurrency import Tasks
from agentenv.errors import GuestError
from agentenv.sdk.guest import Guest

CHUNK = 64 << 10
MAX_HEAD = 64 << 10


class Ports:
    """``forward`` for any protocol, ``host`` for HTTP through the server's own address."""

    def __init__(self, guest: Guest, domain: str | None) -> None:
        self._guest, self._domain = guest, domain

    def host(self, port: int) -> str:
        """The name under which the server passes HTTP and WebSocket on to ``port``."""
        domain = self._domain or urlsplit(self._guest.client.address.url).netloc
        return f"{port}-{self._guest.sandbox_id}.{domain}"

    @asynccontextmanager
    async def forward(
        self, port: int, *, local: int = 0, address: str = "127.0.0.1"
    ) -> AsyncGenerator[tuple[str, int]]:
        """Listen on ``address`` here and pass connections on to ``port`` of the sandbox's loopback.

        Yields where it listens. Raises OSError if that cannot be bound.
        """
        tasks = Tasks()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._pass_on(reader, writer, port)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.start(serve(reader, writer), f"forward {port}")

        server = await asyncio.start_server(accept, address, local)
        try:
            bound = server.sockets[0].getsockname()
            yield bound[0], bound[1]
        finally:
            server.close()
            await tasks.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        """A connection that cannot be passed on is closed: its client sees that nobody answers."""
        with contextlib.suppress(OSError, GuestError), contextlib.closing(writer):
            far_reader, far_writer = await self.connect(port)
            with contextlib.closing(far_writer):
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to ``port`` of the sandbox's loopback. Raises GuestError
        (``guest_port_closed``), OSError."""
        url = urlsplit(self._guest.client.address.url)
        secure = self._guest.client.ssl_context() if url.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            url.hostname, url.port or (443 if secure else 80), ssl=secure,
            server_hostname=url.hostname if secure else None,
        )  # fmt: skip
        try:
            lines = [f"GET /tcp?port={port} HTTP/1.1", f"Host: {url.netloc}"]
            headers = {**self._guest.headers, "Connection": "upgrade", "Upgrade": "tcp"}
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status != 101:
                body = await reader.read(MAX_HEAD)
                raise GuestError(
                    f"port {port} of the sandbox cannot be reached",
                    why=f"HTTP status {status} {body.decode(errors='replace')[:300]}",
                    fix="is a server running there?",
                    code="guest_port_closed",
                )
        except (asyncio.IncompleteReadError, ValueError) as error:
            writer.close()
            raise GuestError(
                f"port {port} of the sandbox cannot be reached",
                why="the connection broke off",
                code="guest_port_closed",
            ) from error
        except BaseException:
            writer.close()
            raise
        return reader, writer


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes until the end, which is passed on too."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
