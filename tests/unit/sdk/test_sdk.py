"""The SDK's public surface: all of it is there, and is loaded when it is asked for."""

import subprocess
import sys

import pytest

from agentenv import sdk


def test_every_public_name_is_found():
    assert all(getattr(sdk, name).__name__ == name for name in sdk.__all__)
    assert sorted(name for names in sdk._HOMES.values() for name in names) == sorted(sdk.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = sdk.Nothing


def test_a_verb_that_needs_the_client_loads_no_more():
    code = "import sys, agentenv.sdk.client; print([m for m in sys.modules if m.startswith('agentenv.sdk.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['agentenv.sdk.client']"
