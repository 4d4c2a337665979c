"""A TCP proxy that is as bad as a test wants: latency, a narrow line, cuts, wrong bytes.

The kernel here has no netem. It works in threads of its own, so a test may block.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PIECE = 64 << 10


@dataclass
class Proxy:
    """Listens at ``port``; what is set here counts for open connections too.

    ``latency`` seconds are added to each direction's bytes, ``rate`` bounds the bytes a second of
    all answers together (0: no bound), ``corrupt`` changes a byte of each large answer.
    """

    target: int
    latency: float = 0.0
    rate: float = 0.0
    corrupt: bool = False
    passed: int = 0
    _down: bool = False
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _open: set[socket.socket] = field(default_factory=set[socket.socket])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def cut(self) -> None:
        """End every connection, and new ones at once."""
        self._down = True
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._down = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._down:
                client.close()
                continue
            _thread(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        ends = {client, server}
        for end in ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= ends
        back = _thread(self._pump, server, client, True)
        self._pump(client, server, False)
        back.join()
        with self._lock:
            self._open -= ends
        for end in ends:
            end.close()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        sender = _thread(self._send, line, sink, answers)
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                line.put((time.monotonic() + self.latency, piece))
        line.put((0.0, b""))
        sender.join()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _send(
        self, line: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while (entry := line.get())[1]:
                due, piece = entry
                if answers:
                    due = max(due, self._turn(len(piece)))
                    self.passed += len(piece)
                    if self.corrupt and len(piece) > PIECE // 16:
                        middle = len(piece) // 2
                        piece = piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
                time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(piece)

    def _turn(self, size: int) -> float:
        """When the line has carried so many bytes more."""
        if not self.rate:
            return 0.0
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.rate
            return self._free_at

    def close(self) -> None:
        self.cut()
        # Closing alone does not wake who accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _thread(body: object, *args: object) -> threading.Thread:
    thread = threading.Thread(target=body, args=args, daemon=True)  # pyright: ignore[reportArgumentType]
    thread.start()
    return thread


@contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    """In front of a port of this machine."""
    made = Proxy(target)
    _thread(made._accept)
    try:
        yield made
    finally:
        made.close()
