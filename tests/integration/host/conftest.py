"""A supervisor of the test's own."""

import asyncio
import signal
from pathlib import Path

import pytest

from agentenv.host.supervised import SupervisedLauncher


@pytest.fixture
async def launcher(tmp_path: Path):
    launcher = SupervisedLauncher(tmp_path / "run" / "sup.sock")
    await launcher.ensure()
    yield launcher
    for status in await launcher.all():
        await launcher.stop(status.name, signal.SIGKILL)
        await launcher.wait(status.name)
    await launcher.quit()
    while (tmp_path / "run" / "sup.sock").exists():
        await asyncio.sleep(0.01)
