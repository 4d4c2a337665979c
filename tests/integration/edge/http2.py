"""An HTTP/2 client that shows what happens to each stream of a connection."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import defaultdict

import h2.config
import h2.connection
import h2.events

Event = h2.events.Event


class Connection:
    """Streams are numbers; ``held`` ones get no more room to send than they had at first."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        self.held: set[int] = set()
        self.owed: dict[int, int] = defaultdict(int)
        self.events: dict[int, asyncio.Queue[Event]] = defaultdict(asyncio.Queue)
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(64 << 20)  # what is held must not hold the rest
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def request(self, authority: str, path: str, *headers: tuple[str, str], method="GET", end=True):
        stream = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "https"), (":path", path)]
        whole = [*pseudo, (":authority", authority), *headers]
        self.h2.send_headers(stream, whole, end_stream=end)
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        self.h2.send_data(stream, data, end_stream=end)
        self.flush()

    def release(self, stream: int) -> None:
        """Give a held stream the room it is owed."""
        self.held.remove(stream)
        self.h2.acknowledge_received_data(self.owed.pop(stream), stream)
        self.flush()

    async def next(self, stream: int, kind: type[Event] | None = None) -> Event:
        """The next event of a stream, or the next of that kind."""
        async with asyncio.timeout(20):
            while True:
                event = await self.events[stream].get()
                if kind is None or isinstance(event, kind):
                    return event

    async def head(self, stream: int) -> dict[str, str]:
        event = await self.next(stream, h2.events.ResponseReceived)
        return dict(event.headers)

    async def data(self, stream: int, length: int) -> bytes:
        got = b""
        while len(got) < length:
            got += (await self.next(stream, h2.events.DataReceived)).data
        return got

    async def body(self, stream: int) -> bytes:
        got = b""
        while not isinstance(event := await self.next(stream), h2.events.StreamEnded):
            assert not isinstance(event, h2.events.StreamReset)
            got += getattr(event, "data", b"")
        return got

    async def pump(self) -> None:
        while data := await self.reader.read(65536):
            for event in self.h2.receive_data(data):
                stream = getattr(event, "stream_id", None) or 0
                if isinstance(event, h2.events.DataReceived):
                    length = event.flow_controlled_length
                    if stream in self.held:
                        self.owed[stream] += length
                    else:
                        self.h2.acknowledge_received_data(length, stream)
                self.events[stream].put_nowait(event)
            self.flush()


@contextlib.asynccontextmanager
async def connect(port: int, trust: ssl.SSLContext):
    trust.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    connection = Connection(reader, writer)
    pump = asyncio.ensure_future(connection.pump())
    try:
        yield connection
    finally:
        pump.cancel()
        writer.close()
