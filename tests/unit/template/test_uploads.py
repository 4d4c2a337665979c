import os
import time

import pytest

from agentenv.errors import UserError
from agentenv.template.uploads import KEPT, Uploads

NAME = "a" * 64


async def pieces(*data: bytes):
    for each in data:
        yield each


@pytest.fixture
def uploads(tmp_path):
    return Uploads(tmp_path / "uploads", limit=10)


async def test_files_are_kept_by_name_and_replaced(uploads):
    assert uploads.find(NAME) is None
    assert await uploads.put(NAME, pieces(b"abc", b"def")) == 6
    assert uploads.find(NAME).read_bytes() == b"abcdef"
    await uploads.put(NAME, pieces(b"new"))
    assert uploads.find(NAME).read_bytes() == b"new"


async def test_too_much_leaves_nothing(uploads, tmp_path):
    with pytest.raises(UserError) as caught:
        await uploads.put(NAME, pieces(b"x" * 8, b"y" * 8))
    assert caught.value.code == "upload_too_large" and caught.value.http_status == 413
    assert not list((tmp_path / "uploads").iterdir())


@pytest.mark.parametrize("name", ["", "A" * 64, "../" + "a" * 61, "a" * 63])
async def test_other_names_are_refused(uploads, name):
    with pytest.raises(UserError):
        uploads.find(name)
    with pytest.raises(UserError):
        await uploads.put(name, pieces(b"x"))


async def test_what_is_used_stays_and_the_rest_is_swept(uploads, tmp_path):
    for name in (NAME, "b" * 64):
        await uploads.put(name, pieces(b"x"))
        long_ago = time.time() - KEPT - 10
        os.utime(tmp_path / "uploads" / name, (long_ago, long_ago))
    (tmp_path / "uploads" / f"{NAME}.draft").write_bytes(b"half")
    uploads.find(NAME)
    uploads.sweep()
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == [NAME]
