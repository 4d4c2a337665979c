"""A catalog of images in a folder of the test's."""

import pytest

from tests.library import opened


@pytest.fixture
async def library(tmp_path):
    async with opened(tmp_path / "home") as library:
        yield library


@pytest.fixture
def records(library):
    return library.records


@pytest.fixture
def catalog(library):
    return library.catalog
