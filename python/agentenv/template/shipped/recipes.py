"""The templates that come with AgentENV, as data. Pure but for reading what is shipped with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.errors import UserError
from agentenv.image.reference import DebianImage, ShippedImage
from agentenv.image.tarball import PATH
from agentenv.model import ImageConfig

VERSION = 1  # of how images are assembled; another one makes all of them anew
SUITE = "bookworm"
PYTHON = "3.11"  # the suite's: wheels are for it
FOLDER = Path(__file__).parent
LOCK = FOLDER / "interpreter.lock"
SERVER = FOLDER / "interpreter"
SERVER_NAME = "agentenv_interpreter"  # what the server's package is called in the guest

# What E2B's users expect of `base`: their user, a shell, Python, and what one reaches for.
_DEBIAN = DebianImage(
    SUITE,
    (
        "bash", "build-essential", "bzip2", "ca-certificates", "curl", "file", "git",
        "iproute2", "iputils-ping", "jq", "less", "lsof", "nano", "netcat-openbsd",
        "openssh-client", "patch", "procps", "psmisc", "python-is-python3", "python3",
        "python3-dev", "python3-pip", "python3-venv", "rsync", "sudo", "tree", "unzip",
        "vim-tiny", "wget", "xz-utils", "zip", "zstd",
    ),
)  # fmt: skip
# Shell commands on the root in $1, in order.
_HOOKS = (
    # Its user has no password and needs none.
    'chroot "$1" useradd --create-home --uid 1000 --user-group --shell /bin/bash user',
    "echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' > \"$1/etc/sudoers.d/user\"",
    'chmod 0440 "$1/etc/sudoers.d/user"',
    # A sandbox is its user's own: pip may install into it (PEP 668 is for shared systems).
    f'rm -f "$1/usr/lib/python{PYTHON}/EXTERNALLY-MANAGED"',
    # Python and the login shell look there only if it is there when they start.
    f'chroot "$1" install -d -o user -g user /home/user/.local /home/user/.local/bin'
    f" /home/user/.local/lib /home/user/.local/lib/python{PYTHON}"
    f" /home/user/.local/lib/python{PYTHON}/site-packages",
)
CONFIG = ImageConfig(
    env=(PATH, "LANG=C.UTF-8"), user="user", working_dir="/home/user", cmd=("/bin/bash",)
)


@dataclass(frozen=True, slots=True)
class Shipped:
    """``packages`` and ``hooks`` make a root of its own; or ``on`` names whose root it adds
    the interpreter to. ``start`` runs in every sandbox; ``ready`` succeeds once it serves."""

    name: str
    packages: DebianImage | None = None
    hooks: Sequence[str] = ()
    on: str | None = None
    start: str = ""
    ready: str = ""
    memory_mib: int | None = None


_ALL = (
    Shipped("base", _DEBIAN, _HOOKS),
    Shipped(
        "code-interpreter-v1",
        on="base",
        # Isolated: a file of the user's that is called as a module of the server's does no harm.
        start=f"exec python3 -I -m {SERVER_NAME}",
        ready="curl --silent --fail --output /dev/null http://127.0.0.1:49999/health",
        memory_mib=1024,
    ),
)
SHIPPED: Mapping[str, Shipped] = {each.name: each for each in _ALL}


def find(name: str) -> Shipped:
    """Raises UserError (``unknown_template``)."""
    if name not in SHIPPED:
        raise UserError(
            f"no template '{name}' comes with AgentENV",
            fix=f"there are: {', '.join(SHIPPED)}",
            code="unknown_template",
        )
    return SHIPPED[name]


def needed(names: Sequence[str]) -> list[Shipped]:
    """Each of them once (without names all), after what it goes on from. Raises UserError."""
    found: dict[str, Shipped] = {}
    for name in names or SHIPPED:
        shipped = find(name)
        if shipped.on:
            found.setdefault(shipped.on, find(shipped.on))
        found.setdefault(name, shipped)
    return list(found.values())


def reference(shipped: Shipped) -> ShippedImage:
    """What its image is called: another name for other content."""
    return ShippedImage(shipped.name, _key(shipped))


def _key(shipped: Shipped) -> str:
    hasher = hashlib.sha256()
    if shipped.on:
        hasher.update(_key(find(shipped.on)).encode())
        for path in (LOCK, *server_files()):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            hasher.update(f"{path.name} {content}\n".encode())
    root = asdict(shipped.packages) if shipped.packages else None
    recipe = [VERSION, PYTHON, root, list(shipped.hooks), asdict(CONFIG)]
    hasher.update(json.dumps(recipe).encode())
    return hasher.hexdigest()[:20]


def server_files() -> list[Path]:
    """The modules that the guest gets."""
    return sorted(SERVER.glob("*.py"))
