"""The restore contract, kept by gVisor: the conformance suite on this package's server."""

from tests.contract.restore.conftest import diary, stranger
from tests.contract.restore.test_restore import *  # noqa: F403

__all__ = ["diary", "stranger"]
