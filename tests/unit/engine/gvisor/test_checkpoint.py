"""A saved sandbox as one file, and what runsc finds of it again."""

import pytest

from agentenv.engine.contract import Suspended
from agentenv.engine.gvisor import checkpoint
from agentenv.engine.gvisor.bundle import RunFiles
from agentenv.errors import InfraError


def test_three_files_become_one_and_three_again(tmp_path):
    saving, run = tmp_path / "saving", tmp_path / "run"
    saving.mkdir()
    run.mkdir()
    contents = {"pages.img": b"p" * 8192, "checkpoint.img": b"s" * 5000, "pages_meta.img": b"m"}
    for name, data in contents.items():
        (saving / name).write_bytes(data)
    memory = tmp_path / "raw.memory"
    memory.touch(mode=0o444)
    kept, pages = checkpoint._join(saving, memory, "key")
    assert memory.stat().st_size == pages * 4096 == 8192 + 8192 + 4096
    again = checkpoint.lay_out(RunFiles(run), Suspended(kept.pack(), b"", (memory,)))
    assert again == kept and again.key == "key"
    for name in ("checkpoint.img", "pages_meta.img"):
        assert (run / "image" / name).read_bytes() == contents[name]
    assert (run / "image/pages.img").read_bytes().startswith(contents["pages.img"])


@pytest.mark.parametrize(
    ("said", "code"),
    [("write pages.img: no space left on device", "disk_full"), ("urpc failed", "save_failed")],
)
def test_a_full_disk_is_told_from_a_failure(said, code):
    assert checkpoint._unsaved(RuntimeError(said)).code == code


@pytest.mark.parametrize("state", [b"", b"{}", b'{"key": 1, "state": [1], "places": []}'])
def test_a_damaged_record_is_told(state):
    with pytest.raises(InfraError) as caught:
        checkpoint.Kept.unpack(state)
    assert caught.value.code == "snapshot_damaged"
