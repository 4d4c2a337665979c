from pathlib import Path

import pytest
from tests.blocks import Store, block_folder, directory_store

from agentenv.host.tools import Tools


@pytest.fixture
def tools():
    return Tools.from_environ()


@pytest.fixture
async def folder():
    async with block_folder() as made:
        yield made


@pytest.fixture
def store(folder: Path) -> Store:
    return directory_store(folder)
