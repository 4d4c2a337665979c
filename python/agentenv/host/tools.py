"""Where tools, guest kernel and our own programs lie; what is missing is named with its remedy.

``make setup`` puts them there. Looked for in this order: the tools folder (``AENV_TOOLS``, else
``/opt/agentenv``), then PATH and the folders of system tools that a user's PATH may lack.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import MissingTool

DEFAULT_FOLDER = Path("/opt/agentenv")
SETUP = "run: make setup"
_SYSTEM = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# The checkout of an editable install; in an installed wheel no target/release lies there.
_CHECKOUT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """The guest kernel's image and its modules, in the order to insert them.

    The image is the uncompressed ELF file where there is one, else the bzImage.
    """

    image: Path
    modules: tuple[Path, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Tools:
    """Looks tools up; a value, so that tests and several nodes may have each their own."""

    folder: Path = DEFAULT_FOLDER
    binaries: tuple[Path, ...] = (_CHECKOUT / "target" / "release", DEFAULT_FOLDER / "bin")
    path: str = os.defpath

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Tools:
        """``AENV_TOOLS``, ``AENV_BIN_DIR`` and PATH, or their defaults."""
        folder = Path(environ.get("AENV_TOOLS") or DEFAULT_FOLDER)
        if given := environ.get("AENV_BIN_DIR"):
            binaries: tuple[Path, ...] = (Path(given),)
        else:
            binaries = (_CHECKOUT / "target" / "release", folder / "bin")
        return cls(folder, binaries, environ.get("PATH") or os.defpath)

    def find(self, name: str) -> Path:
        """The executable ``name``. Raises MissingTool."""
        own = [str(self.folder / "erofs-utils" / "bin"), str(self.folder / "bin")]
        search = os.pathsep.join([*own, self.path, *_SYSTEM])
        if found := shutil.which(name, path=search):
            return Path(found)
        raise MissingTool(
            f"{name} is not installed", why=f"neither in {self.folder} nor in PATH", fix=SETUP
        )

    def binary(self, name: str) -> Path:
        """One of our own compiled programs. Raises MissingTool."""
        for folder in self.binaries:
            if os.access(path := folder / name, os.X_OK):
                return path
        looked = " nor ".join(str(folder) for folder in self.binaries)
        raise MissingTool(f"{name} is not built", why=f"not in {looked}", fix=SETUP)

    def kernel(self) -> GuestKernel:
        """The guest kernel with every module it must load. Raises MissingTool."""
        folder = self.folder / "kernel"
        try:
            names = (folder / "modules.load").read_text().split()
            version = (folder / "version").read_text().strip()
        except FileNotFoundError as error:
            raise MissingTool(
                "the guest kernel is missing", why=f"no {error.filename}", fix=SETUP
            ) from error
        plain = folder / "vmlinux"
        image = plain if plain.is_file() else folder / "vmlinuz"
        modules = tuple(folder / "modules" / name for name in names)
        if absent := [path for path in (image, *modules) if not path.is_file()]:
            raise MissingTool("the guest kernel is incomplete", why=f"no {absent[0]}", fix=SETUP)
        return GuestKernel(image, modules, version)
