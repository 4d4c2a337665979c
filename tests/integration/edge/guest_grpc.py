"""A server in the test's sandbox that speaks HTTP/2 from the first byte: `guest_grpc.py ADDRESS PORT`.

As a gRPC server: each message goes back as it comes, the status is in the trailers. The path
/refuse answers by a status alone.
"""

from __future__ import annotations

import asyncio
import sys

import h2.config
import h2.connection
import h2.events

HEAD = [(":status", "200"), ("content-type", "application/grpc")]


class Server(asyncio.Protocol):
    def connection_made(self, transport) -> None:
        self.transport = transport
        self.done: set[int] = set()
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.RequestReceived():
                    self.begin(event.stream_id, dict(event.headers))
                case h2.events.DataReceived():
                    length = event.flow_controlled_length
                    self.h2.acknowledge_received_data(length, event.stream_id)
                    self.h2.send_data(event.stream_id, event.data)
                case h2.events.StreamEnded() if event.stream_id not in self.done:
                    self.h2.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
        self.transport.write(self.h2.data_to_send())

    def connection_lost(self, exc) -> None:
        print("lost", flush=True)

    def begin(self, stream: int, headers: dict[str, str]) -> None:
        if headers[":path"] == "/refuse":
            self.done.add(stream)
            self.h2.send_headers(stream, [*HEAD, ("grpc-status", "7")], end_stream=True)
            return
        seen = [(f"x-{name.strip(':')}", value) for name, value in headers.items()]
        self.h2.send_headers(stream, [*HEAD, *seen])


async def main(address: str, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Server, address, port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
