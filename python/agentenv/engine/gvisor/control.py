"""The control channel to a sandbox without a port of a machine's: the agent's TCP port.

A connection begins with the key of the sandbox's generation. It is cut when the agent dies, and by
a snapshot: the next call makes another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from agentenv.concurrency import Tasks
from agentenv.engine.contract import Attachment
from agentenv.engine.control import LineControl
from agentenv.errors import GuestError, faults
from agentenv.host import netns

PORT = 49982  # rust/agent/src/control/tcp.rs
KEY_BYTES = 32
TRY_AGAIN = 0.005  # seconds
PING_DEADLINE = 10.0  # seconds


def fresh_key() -> str:
    return secrets.token_hex(KEY_BYTES)


class Keys:
    """The keys that the agent may want, the likeliest first, in a file of the machine's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str]:
        with faults("the sandbox's control key could not be read"):
            return json.loads(self._path.read_text())

    def write(self, keys: list[str]) -> None:
        fresh = self._path.with_suffix(".new")
        with faults("the sandbox's control key could not be kept"):
            fresh.touch(mode=0o600)
            fresh.write_text(json.dumps(keys))
            fresh.rename(self._path)


class TcpControl:
    """Implements ``ControlChannel``; after what ``end`` waits for no agent will answer."""

    def __init__(
        self, network: Attachment, keys: Keys, end: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        self._network, self._keys, self._end = network, keys, end
        self._line: LineControl | None = None
        self._opening = asyncio.Lock()

    async def call(self, op: str, args: dict[str, Any] | None = None, *, timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await self._unless_ended(self._asked(op, args, timeout))
        except TimeoutError:
            raise GuestError(
                f"the guest's agent did not answer {op!r} within {timeout:g} s",
                code="guest_unresponsive",
            ) from None

    async def _asked(self, op: str, args: dict[str, Any] | None, timeout: float) -> Any:
        line = await self._connected()
        if op == "init":
            return await self._initialise(line, args or {}, timeout)
        return await line.call(op, args, timeout=timeout)

    async def _unless_ended(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Its namespace goes with a sandbox that died: no packet would tell of that."""
        tasks = Tasks()
        answered = tasks.start(work, "word with the agent", awaited=True)
        ended = tasks.start(self._end(), "the end")
        try:
            await asyncio.wait((answered, ended), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise GuestError("the sandbox has ended", code="guest_unresponsive")
            return answered.result()
        finally:
            await tasks.close()

    async def close(self) -> None:
        if self._line is not None:
            await self._line.close()

    async def _initialise(self, line: LineControl, args: dict[str, Any], timeout: float) -> Any:
        """A generation has a key of its own: a copy must not know its siblings'."""
        before, fresh = self._keys.read(), fresh_key()
        self._keys.write([fresh, *before])
        done = await line.call("init", {**args, "control_key": fresh}, timeout=timeout)
        self._keys.write([fresh])
        return done

    async def _connected(self) -> LineControl:
        async with self._opening:
            while self._line is None or self._line.closed:
                self._line = await self._open()
                if self._line is None:
                    await asyncio.sleep(TRY_AGAIN)
            return self._line

    async def _open(self) -> LineControl | None:
        """A connection that the agent accepted; None if it does not listen yet."""
        for key in self._keys.read():
            try:
                connected = await self._connect()
            except OSError:
                return None
            line = await LineControl.on(connected, key.encode())
            try:
                await line.call("ping", timeout=PING_DEADLINE)
            except BaseException as error:
                await line.close()
                if not isinstance(error, GuestError):
                    raise
                continue
            return line
        return None

    async def _connect(self) -> socket.socket:
        """Raises OSError."""

        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made

        connecting = await asyncio.to_thread(netns.inside, self._network.netns, make)
        address = self._network.address.partition("/")[0]
        try:
            await asyncio.get_running_loop().sock_connect(connecting, (address, PORT))
        except BaseException:
            with contextlib.suppress(OSError):
                connecting.close()
            raise
        return connecting
