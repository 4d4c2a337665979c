"""Connect's streaming envelope: 1 byte flags, 4 bytes big-endian length, JSON. Pure.

Flag 2 marks the end-of-stream message, which is ``{}`` or ``{"error": {"code", "message"}}``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from agentenv.errors import GuestError

END_OF_STREAM = 2
MAX_MESSAGE = 64 << 20  # bytes; the agent's chunks are 32 KiB, so anything near this is garbage
_HEAD = struct.Struct(">BI")


def encode(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return _HEAD.pack(0, len(data)) + data


class Decoder:
    """Feed bytes as they come, take whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield ``(flags, message)``. Raises GuestError (``guest_protocol``) on garbage."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(self._buffer)
            if length > MAX_MESSAGE:
                raise GuestError("the guest sent an oversized message", code="guest_protocol")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            text = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            try:
                yield flags, json.loads(text)
            except ValueError as error:
                raise GuestError(
                    "the guest sent no JSON", why=str(error), code="guest_protocol"
                ) from error
