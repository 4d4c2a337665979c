"""A catalog of images in a folder of the test's."""

import pytest

from agentenv.image.registry import RegistrySettings
from agentenv.layer.catalog import ImageCatalog
from agentenv.store.directory import DirectoryBlobs
from agentenv.store.sql import SqlRecords


@pytest.fixture
async def records(tmp_path):
    store = await SqlRecords.open_sqlite(tmp_path / "state.db")
    yield store
    await store.close()


@pytest.fixture
def blobs(tmp_path):
    return DirectoryBlobs(tmp_path / "blobs")


@pytest.fixture
def catalog(tmp_path, blobs, records):
    return ImageCatalog(tmp_path, blobs, records, RegistrySettings())
