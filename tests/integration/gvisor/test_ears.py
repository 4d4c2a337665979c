"""The agent's connections outlive a restore: it is not started anew because it heard nothing."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

from agentenv.errors import AgentEnvError
from agentenv.sdk import AgentEnv

pytestmark = pytest.mark.only("gvisor")
CLIENTS = 2
ROUNDS = 20  # before the remedy (decision 071) two or three of them made it deaf


@contextmanager
def traffic(server, sandbox_id):
    """Clients that ask without a pause; yields what counts the answers."""
    over = threading.Event()
    answers = []

    async def ask(sandbox):
        while not over.is_set():
            try:
                answers.append((await sandbox.commands.run(("true",))).exit_code)
            except AgentEnvError:
                await asyncio.sleep(0.01)  # it is paused just now

    async def drive():
        async with AgentEnv(server.url, server.key) as env:
            sandbox = await env.open(sandbox_id)
            await asyncio.gather(*(ask(sandbox) for _ in range(CLIENTS)))

    clients = threading.Thread(target=asyncio.run, args=[drive()])
    clients.start()
    try:
        yield answers
    finally:
        over.set()
        clients.join()


@pytest.mark.full
def test_it_hears_after_every_restore_under_traffic(server, guest):
    agent = guest.sh("echo $PPID")
    with traffic(server, guest.id) as answers:
        for _ in range(ROUNDS):
            before = len(answers)
            guest.pause()
            guest.resume()
            assert guest.sh("echo $PPID") == agent
            assert len(answers) > before
