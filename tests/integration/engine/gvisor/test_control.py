"""Words with an agent that has gone without a packet."""

import asyncio
import socket
from pathlib import Path

import pytest

from agentenv.engine.contract import Attachment
from agentenv.engine.gvisor.control import PORT, Keys, TcpControl
from agentenv.errors import GuestError

HERE = Path("/proc/self/ns/net")


@pytest.fixture
def silent(tmp_path):
    """An agent's port where connections are taken and nothing is ever said."""
    keys = Keys(tmp_path / "keys")
    keys.write(["k"])
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.49", PORT))
        listener.listen()
        yield keys


@pytest.mark.parametrize("op", ["init", "ping"])
async def test_a_call_does_not_outlast_the_sandbox(silent, op):
    over = asyncio.Event()
    network = Attachment(HERE, "tap0", "02::1", "127.0.0.49/8", "127.0.0.1", ())
    control = TcpControl(network, silent, over.wait)
    call = asyncio.create_task(control.call(op, timeout=3600))
    await asyncio.sleep(0)
    over.set()
    with pytest.raises(GuestError, match="has ended"):
        async with asyncio.timeout(60):
            await call
