"""A server whose engine is gVisor, on a copy of the session's images."""

import pytest

from tests.integration.suspend.conftest import counting, guest, guest_of
from tests.server import serving_copy

__all__ = ["counting", "guest", "guest_of"]


@pytest.fixture(scope="package")
def server(server, scratch):
    """In place of the session's."""
    with serving_copy(scratch, server, AENV_ENGINE="gvisor") as running:
        yield running
