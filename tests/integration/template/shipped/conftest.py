"""Packages of the tests' own, so that no index is asked."""

import hashlib
import zipfile

import pytest


@pytest.fixture
def lock(tmp_path):
    """A lock that names one wheel with a module, a command, a script and data."""
    path = tmp_path / "own-1.0-py3-none-any.whl"
    info = "own-1.0.dist-info"
    files = {
        "own.py": "def main(): print('own')\n",
        "own-1.0.data/scripts/old": "#!python\nprint('old')\n",
        "own-1.0.data/data/share/own/x": "x",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nown = own:main\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in {**files, f"{info}/RECORD": record}.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if "/scripts/" in name else 0o100644) << 16
            wheel.writestr(entry, content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    lock = tmp_path / "own.lock"
    lock.write_text(f"own @ {path.as_uri()} --hash=sha256:{digest}\n")
    return lock
