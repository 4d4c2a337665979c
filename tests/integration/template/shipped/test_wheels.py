"""Wheels in a guest's root."""

import os

import pytest

from agentenv.errors import ImageError
from agentenv.template.shipped import wheels
from agentenv.template.shipped.recipes import PYTHON, SUITE

FOLDER = wheels.packages_folder(PYTHON).lstrip("/")


async def test_everything_lies_where_the_wheel_says(lock, tmp_path):
    root = tmp_path / "root"
    await wheels.install(lock, PYTHON, root)
    assert (root / FOLDER / "own.py").is_file()
    assert (root / "usr/local/share/own/x").read_text() == "x"
    for name in ("own", "old"):
        command = root / "usr/local/bin" / name
        assert command.read_text().startswith("#!/usr/bin/python3\n")
        assert os.access(command, os.X_OK)
    assert (root / FOLDER / "own-1.0.dist-info/INSTALLER").read_bytes() == wheels.MAKER


async def test_another_content_is_refused(lock, tmp_path):
    lock.write_text(lock.read_text()[:-9] + "00000000\n")
    with pytest.raises(ImageError, match="could not be fetched"):
        await wheels.install(lock, PYTHON, tmp_path / "root")


async def test_compiled_for_the_guest_with_one_time_for_all(lock, tmp_path):
    root = tmp_path / "root"
    await wheels.install(lock, PYTHON, root)
    await wheels.compile_all(SUITE, PYTHON, root)
    made = root / FOLDER / f"__pycache__/own.cpython-{PYTHON.replace('.', '')}.pyc"
    # Bytes 8 to 12 of a compiled file are the time of its source (PEP 552).
    time = int.from_bytes(made.read_bytes()[8:12], "little")
    assert {time} == {int(path.stat().st_mtime) for path in [root, *root.rglob("*")]}
    assert all(path.stat().st_mode & 0o555 == 0o555 for path in root.rglob("*") if path.is_dir())
