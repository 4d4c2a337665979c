"""Where a machine's memory is found. The rest meets real machines: tests/integration/suspend."""

import pytest

from agentenv.engine.qemu.suspend import memory_of
from agentenv.errors import InfraError

MAPS = """\
7f0000000000-7f0000021000 rw-p 00000000 00:00 0
7f1000000000-7f1020000000 rw-s 00000000 00:01 2049  /memfd:memory-backend-memfd (deleted)
7f2000000000-7f2000001000 rw-s 00000000 00:01 2050  /memfd:other (deleted)
"""


def test_a_booted_machines_memory_is_the_memory_file():
    assert memory_of(MAPS) == (0x7F1000000000, 512 << 20)


def test_a_machine_without_one_is_an_error():
    with pytest.raises(InfraError) as caught:
        memory_of(MAPS.replace("memory-backend", "something"))
    assert caught.value.code == "engine_failed"
