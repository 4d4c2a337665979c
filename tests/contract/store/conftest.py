"""A real S3 server for the suites of this folder, and an identity for it."""

from __future__ import annotations

import os

import pytest
import pytest_asyncio
from tests.s3 import s3_server


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def s3():
    async with s3_server() as running:
        yield running


@pytest.fixture
def no_identity(tmp_path, monkeypatch):
    """Nothing of the machine's own user is seen: neither variables nor files."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def s3_keys(s3, no_identity, monkeypatch):
    """The server, with its keys in the environment."""
    for name, value in s3.keys.items():
        monkeypatch.setenv(name, value)
    return s3
