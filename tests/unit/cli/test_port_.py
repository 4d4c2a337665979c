import pytest

from agentenv.cli.port_ import ports
from agentenv.errors import UserError


def test_ports():
    assert ports("80") == (80, 80)
    assert ports("8080:80") == (8080, 80) and ports("0:65535") == (0, 65535)
    for bad in ("", "0", "x", "-1", "1:0", "65536", "1:2:3", "80:"):
        with pytest.raises(UserError, match="is no port"):
            ports(bad)
