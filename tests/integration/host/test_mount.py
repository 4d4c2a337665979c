"""Mounts of files, with the real kernel."""

import errno
from pathlib import Path

import pytest

from agentenv.host import mount
from agentenv.host.process import run


@pytest.fixture
async def image(tmp_path: Path) -> Path:
    """A file system with one file."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("content")
    image = tmp_path / "image"
    await run(("truncate", "-s", "4M", str(image)), timeout=20)
    await run(("mkfs.ext4", "-q", "-F", "-d", str(folder), str(image)), timeout=20)
    return image


@pytest.fixture
def point(tmp_path: Path):
    point = tmp_path / "point"
    point.mkdir()
    yield point
    mount.detach(point)


async def test_a_file_that_needs_a_device_is_read_past_the_page_cache(image: Path, point: Path):
    await mount.attach_file(image, point, "ext4")
    assert (point / "a").read_text() == "content"
    with pytest.raises(OSError, match="Read-only"):
        (point / "b").touch()
    loop = Path("/sys/block") / mount.device_of(point).name / "loop"
    assert (loop / "backing_file").read_text().strip() == str(image)
    assert (loop / "dio").read_text() == (loop / "autoclear").read_text() == "1\n"


async def test_what_is_in_use_goes_with_its_last_user(image: Path, point: Path):
    await mount.attach_file(image, point, "ext4")
    loop = Path("/sys/block") / mount.device_of(point).name / "loop"
    with (point / "a").open() as file:
        mount.detach(point)
        mount.detach(point)  # nothing is there any more
        assert list(point.iterdir()) == [] and loop.exists()
        assert file.read() == "content"
    assert not loop.exists()


async def test_what_is_no_file_system_says_why(tmp_path: Path, point: Path):
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(1 << 20))
    with pytest.raises(OSError) as caught:
        await mount.attach_file(plain, point, "erofs")
    assert caught.value.errno == errno.EINVAL and str(point) in str(caught.value)
    with pytest.raises(OSError, match="No such"):
        await mount.attach_file(tmp_path / "missing", point, "erofs")
