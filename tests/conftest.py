"""Fixtures of suites that need the whole product: one server and one base image a session."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.leaks import nothing_left
from tests.server import serving_base


@pytest.fixture(scope="session")
def scratch():
    """A folder with a short path on the disk, gone at the end."""
    path = Path(tempfile.mkdtemp(prefix="aenv-", dir="/var/tmp"))
    path.chmod(0o755)  # engines run as users of their own and must reach their files
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def server(scratch):
    """A server with the template `base`; suites that kill or fill things start their own."""
    with nothing_left(scratch) as watched:
        with serving_base(scratch) as running:
            yield running
        # Every server of the session has a log, which outlives its home.
        watched.extend(log.with_suffix("") for log in scratch.glob("h*.log"))
