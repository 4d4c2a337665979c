"""Client of the supervisor: the ``Launcher`` whose processes outlive us."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any

from agentenv.errors import AgentEnvError, Conflict, InfraError, NotFound
from agentenv.host.process import ProcessSpec, ProcessStatus, run, spec_to_json

START_DEADLINE = 15.0  # seconds; a loaded machine starts an interpreter slowly
_ERRORS: dict[str, type[AgentEnvError]] = {"conflict": Conflict, "not_found": NotFound}


class SupervisedLauncher:
    """Talks to the supervisor at ``path``, one connection per request."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def ensure(self) -> None:
        """Start the supervisor if none answers. Raises InfraError if it does not come up."""
        if await self._answers():
            return
        self._path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        log = self._path.with_name(self._path.name + ".log")
        script = 'exec "$0" -m agentenv.host.supervisor "$1" >>"$2" 2>&1'
        # setsid --fork: the supervisor must be no child of ours and in no session of ours.
        await run(
            ("setsid", "--fork", "sh", "-c", script, sys.executable, str(self._path), str(log))
        )
        try:
            async with asyncio.timeout(START_DEADLINE):
                while not await self._answers():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise InfraError(
                "the supervisor does not answer", why=f"see {log}", code="supervisor_down"
            ) from None

    async def _answers(self) -> bool:
        try:
            await self.all()
        except InfraError:
            return False
        return True

    async def launch(self, spec: ProcessSpec, fds: Sequence[int] = ()) -> ProcessStatus:
        return _status(await self._ask({"op": "launch", "spec": spec_to_json(spec)}, fds))

    async def status(self, name: str) -> ProcessStatus | None:
        raw = await self._ask({"op": "status", "name": name})
        return _status(raw) if raw else None

    async def all(self) -> tuple[ProcessStatus, ...]:
        return tuple(_status(raw) for raw in await self._ask({"op": "all"}))

    async def wait(self, name: str) -> ProcessStatus:
        return _status(await self._ask({"op": "wait", "name": name}))

    async def signal(self, name: str, number: int) -> None:
        await self._ask({"op": "signal", "name": name, "number": int(number)})

    async def stop(self, name: str, number: int = SIGTERM) -> None:
        await self._ask({"op": "stop", "name": name, "number": int(number)})

    async def forget(self, name: str) -> None:
        await self._ask({"op": "forget", "name": name})

    async def quit(self) -> None:
        """End the supervisor; Conflict while it has running processes."""
        await self._ask({"op": "quit"})

    async def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            try:
                await loop.sock_connect(connection, str(self._path))
                data = json.dumps(request).encode() + b"\n"
                if fds:
                    sent = socket.send_fds(connection, [data[:1]], list(fds))
                    data = data[sent:]
                await loop.sock_sendall(connection, data)
                reply = await _read_line(connection)
            except OSError as error:
                raise InfraError(
                    "the supervisor does not answer", why=str(error), code="supervisor_down"
                ) from error
        if "error" in reply:
            fault = reply["error"]
            kind = _ERRORS.get(fault["code"], InfraError)
            raise kind(fault["message"], why=fault["why"], code=fault["code"])
        return reply["ok"]


async def _read_line(connection: socket.socket) -> dict[str, Any]:
    loop, data = asyncio.get_running_loop(), b""
    while not data.endswith(b"\n"):
        chunk = await loop.sock_recv(connection, 65536)
        if not chunk:
            raise ConnectionResetError("the supervisor closed the connection")
        data += chunk
    return json.loads(data)


def _status(raw: dict[str, Any]) -> ProcessStatus:
    return ProcessStatus(**raw)
