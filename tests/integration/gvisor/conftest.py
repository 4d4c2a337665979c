"""What gVisor alone has: the session's server of it, and nothing that waits there."""

import pytest

from tests.integration.suspend.conftest import counting, guest, guest_of
from tests.server import serving_copy

__all__ = ["counting", "guest", "guest_of"]


@pytest.fixture(scope="package")
def server(server, scratch):
    """In place of the session's. Whatever holds a mount is a test's own: no machine waits."""
    with serving_copy(scratch, server, AENV_WARM_MACHINES="0") as running:
        yield running
