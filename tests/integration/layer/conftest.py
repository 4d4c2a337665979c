import pytest

from agentenv.host.tools import Tools


@pytest.fixture
def tools():
    return Tools.from_environ()
