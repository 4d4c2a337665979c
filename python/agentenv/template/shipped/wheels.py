"""Python packages for a guest: fetched with pip, installed and compiled on the host.

pip asks the index that this machine is configured for; every wheel is checked by its hash. PyPA's
`installer` puts each where it says, for the guest's interpreter, which also compiles them: what a
user's process compiles in a sandbox it could not keep.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from agentenv.errors import ImageError
from agentenv.host.process import ProcessFailed, run
from agentenv.image.debian import EPOCH, inside
from agentenv.image.reference import DebianImage

INTERPRETER = "/usr/bin/python3"
MAKER = b"agentenv\n"  # INSTALLER of each package
DEADLINE = 1800.0  # seconds
GLIBC = 36  # the minor version of Debian 12's; older ones' wheels fit
OLDEST_GLIBC = 17


def packages_folder(python: str) -> str:
    """Where a Debian guest's Python (``3.11``) looks for what root installed."""
    return f"/usr/local/lib/python{python}/dist-packages"


async def install(lock: Path, python: str, root: Path) -> None:
    """What ``lock`` names, into a guest's root. Raises ImageError."""
    with TemporaryDirectory(prefix="aenv-wheels-") as folder:
        await _fetch(lock, python, Path(folder))
        await asyncio.to_thread(_unpack, sorted(Path(folder).glob("*.whl")), python, root)


async def _fetch(lock: Path, python: str, target: Path) -> None:
    argv = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-input", "--require-hashes", "--no-deps", "--only-binary=:all:",
        "--dest", str(target), "--requirement", str(lock), *_tags(python),
    ]  # fmt: skip
    try:
        await run(argv, timeout=DEADLINE)
    except ProcessFailed as error:
        raise ImageError(
            "Python packages could not be fetched",
            why=error.why,
            fix="check that pip is there and reaches its index",
            code="build_failed",
        ) from error


def _tags(python: str) -> list[str]:
    """Of the guest, whatever the host's interpreter is."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, OLDEST_GLIBC - 1, -1)]
    abis = [f"cp{python.replace('.', '')}", "abi3", "none"]
    return [
        "--implementation=cp",
        f"--python-version={python}",
        *(f"--abi={abi}" for abi in abis),
        *(f"--platform={name}" for name in (*platforms, "manylinux2014_x86_64", "any")),
    ]


def _unpack(wheels: Sequence[Path], python: str, root: Path) -> None:
    import installer
    from installer.destinations import SchemeDictionaryDestination
    from installer.sources import WheelFile

    folder = packages_folder(python)
    destination = SchemeDictionaryDestination(
        {
            "purelib": folder,
            "platlib": folder,
            "headers": f"/usr/local/include/python{python}",
            "scripts": "/usr/local/bin",
            "data": "/usr/local",
        },
        interpreter=INTERPRETER,
        script_kind="posix",
        destdir=str(root),
    )
    for wheel in wheels:
        with WheelFile.open(wheel) as source:
            installer.install(source, destination, {"INSTALLER": MAKER})


async def compile_all(suite: str, python: str, root: Path) -> None:
    """Compile a root's packages with the suite's own interpreter, in a root that is not kept.

    Times are set first: a compiled file holds its source's, not its hash, which would be computed
    at each import. Raises ImageError.
    """
    await asyncio.to_thread(settle, root)
    there, folder = shlex.quote(str(root)), packages_folder(python)
    packages = (f"python{python}-minimal", f"libpython{python}-stdlib")
    hooks = (
        f'mkdir -p "$1{folder}" && cp -a {there}{folder}/. "$1{folder}/"',
        f'chroot "$1" /usr/bin/python{python} -m compileall -q'
        f" --invalidation-mode=timestamp {folder}",
        f'cp -a "$1{folder}/." {there}{folder}/',
    )
    await inside(DebianImage(suite, packages), hooks)
    await asyncio.to_thread(settle, root)


def settle(root: Path) -> None:
    """One time for all, and folders that anybody may enter: the same content, the same image."""
    for folder, _, files in os.walk(root):
        Path(folder).chmod(0o755)
        for path in (Path(folder), *(Path(folder) / name for name in files)):
            os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)
