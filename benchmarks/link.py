"""A slow network in a process of its own: `python -m benchmarks.link PORT TARGET DELAY RATE`.

The kernel has no netem here. Connections to PORT go on to TARGET: each byte arrives DELAY seconds
(one way) after it was sent, all bytes of one direction share RATE bytes a second, and a connection's
first byte also pays for the handshake. TCP's slow start is not imitated: in that it is kind to
everybody.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.s3 import free_port
from tests.waiting import until

PIECE = 32 << 10
AHEAD = 0.02  # seconds of the line's time that may be booked ahead


class Line:
    """One direction, shared by all connections."""

    def __init__(self, delay: float, rate: float) -> None:
        self._delay, self._rate = delay, rate
        self._free = 0.0

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, extra: float
    ) -> None:
        """Until the end of what is read; ``extra`` seconds late."""
        loop = asyncio.get_running_loop()
        under_way = asyncio.Queue[tuple[float, bytes]](256)
        deliver = asyncio.create_task(self._deliver(under_way, writer))
        begun = loop.time()
        try:
            while piece := await reader.read(PIECE):
                self._free = max(self._free, loop.time()) + len(piece) / self._rate
                await under_way.put((max(self._free, begun + extra) + self._delay, piece))
                if (wait := self._free - loop.time() - AHEAD) > 0:
                    await asyncio.sleep(wait)
            await under_way.put((loop.time() + self._delay, b""))
            await deliver
        except OSError:
            writer.close()
        finally:
            deliver.cancel()

    @staticmethod
    async def _deliver(
        under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, piece = await under_way.get()
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            if not piece:
                writer.close()
                return
            writer.write(piece)
            await writer.drain()


async def _serve(port: int, target: int, delay: float, rate: float) -> None:
    there, back = Line(delay, rate), Line(delay, rate)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(
            there.carry(reader, far_writer, 2 * delay),
            back.carry(far_reader, writer, 0),
            return_exceptions=True,
        )

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 20)
    await server.serve_forever()


@contextmanager
def link(target: int, *, round_trip: float, rate: float) -> Iterator[int]:
    """A port that leads to ``target`` on this machine; ``rate`` in bytes a second."""
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "benchmarks.link",
        *map(str, (port, target, round_trip / 2, rate)),
    ]
    process = subprocess.Popen(argv)
    try:
        until(lambda: _listens(port))
        yield port
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    _port, _target, _delay, _rate = sys.argv[1:]
    asyncio.run(_serve(int(_port), int(_target), float(_delay), float(_rate)))
