"""QEMU's monitor, by the client that QEMU's own developers keep (`qemu.qmp`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from qemu.qmp import ConnectError, QMPClient, QMPError, Runstate

from agentenv.errors import InfraError

DEADLINE = 10.0  # seconds for a command; QEMU answers between two slices of the guest
# A monitor was seen (once, in CI) to answer the first message with what is no answer to it. Nothing
# was commanded by then: to ask again is safe.
TRIES = 5
PAUSE = 0.02  # seconds


@asynccontextmanager
async def connected(socket: Path, deadline: float = DEADLINE) -> AsyncGenerator[QMPClient]:
    """The monitor at ``socket``, which serves one client at a time, for ``deadline`` seconds.

    Raises InfraError (``engine_unresponsive``) if it does not answer or refuses.
    """
    try:
        async with asyncio.timeout(deadline):
            client = await _session(socket)
            try:
                yield client
            finally:
                await client.disconnect()
    except (QMPError, OSError, TimeoutError) as error:
        raise InfraError(
            "QEMU's monitor does not do as told",
            why=str(error) or type(error).__name__,
            code="engine_unresponsive",
        ) from error


async def _session(socket: Path) -> QMPClient:
    tries = 0
    while True:
        client = QMPClient("agentenv")
        client.logger.disabled = True  # what goes wrong is raised
        try:
            await client.connect(str(socket))
            return client
        except ConnectError as error:
            tries += 1
            if tries == TRIES or isinstance(error.exc, OSError):  # nobody listens
                raise
        finally:
            if client.runstate is not Runstate.RUNNING:
                await client.disconnect()
        await asyncio.sleep(PAUSE)
