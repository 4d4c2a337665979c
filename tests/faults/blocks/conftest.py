"""A folder and a store of a test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.blocks import Store, block_folder, directory_store


@pytest.fixture
async def folder():
    async with block_folder() as made:
        yield made


@pytest.fixture
def store(folder: Path) -> Store:
    return directory_store(folder)
