"""QEMU's monitor, by the client that QEMU's own developers keep (`qemu.qmp`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from qemu.qmp import QMPClient, QMPError

from agentenv.errors import InfraError

DEADLINE = 10.0  # seconds for a command; QEMU answers between two slices of the guest


@asynccontextmanager
async def connected(socket: Path, deadline: float = DEADLINE) -> AsyncGenerator[QMPClient]:
    """The monitor at ``socket``, which serves one client at a time, for ``deadline`` seconds.

    Raises InfraError (``engine_unresponsive``) if it does not answer or refuses.
    """
    client = QMPClient("agentenv")
    client.logger.disabled = True  # what goes wrong is raised
    try:
        async with asyncio.timeout(deadline):
            await client.connect(str(socket))
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
