"""Languages: the kernel that runs each, and how its environment is changed. Pure."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Changes = Mapping[str, str | None]
"""Variables to set; those to unset are None."""


@dataclass(frozen=True, slots=True)
class Language:
    """``kernel`` is the command of its kernel; ``assign`` gives code that changes the environment
    and leaves nothing else behind. ``warm`` is run, unseen, in the context that is made first.
    ``transport`` is ``ipc`` (Unix sockets) where the kernel can, else ``tcp``. ``late``: seconds
    without a word until all is heard of a kernel that may say it is idle before it shows a result.
    """

    name: str
    kernel: tuple[str, ...]
    assign: Callable[[Changes], str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    warm: str = ""
    transport: str = "ipc"
    late: float = 0.0


def _python(changes: Changes) -> str:
    given = {name: value for name, value in changes.items() if value is not None}
    gone = [name for name, value in changes.items() if value is None]
    environ = "__import__('os').environ"
    return f"{environ}.update({given!r}); [{environ}.pop(each, 0) for each in {gone!r}]"


def _bash(changes: Changes) -> str:
    return "; ".join(
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in changes.items()
    )


def _deno(changes: Changes) -> str:
    return "".join(
        f"Deno.env.delete({json.dumps(name)});"
        if value is None
        else f"Deno.env.set({json.dumps(name)}, {json.dumps(value)});"
        for name, value in changes.items()
    )


# What most cells import: in a snapshot it is loaded once, for all sandboxes. Nothing of it is in
# the user's namespace.
_WARM = """
exec('''
import contextlib
for name in ("numpy", "pandas", "matplotlib.pyplot"):
    with contextlib.suppress(ImportError):
        __import__(name)
''', {})
"""
_IPYKERNEL = (sys.executable, str(Path(__file__).with_name("launch.py")), "-f", "{connection_file}")
_BASH_KERNEL = "--IPKernelApp.kernel_class=bash_kernel.kernel.BashKernel"
_DENO = ("deno", "jupyter", "--kernel", "--conn", "{connection_file}")
_DENO_ENV = {"DENO_NO_UPDATE_CHECK": "1", "NO_COLOR": "1"}

PYTHON = Language(
    "python",
    _IPYKERNEL,
    _python,
    warm=_WARM,
)
LANGUAGES: Mapping[str, Language] = {
    each.name: each
    for each in (
        PYTHON,
        Language("bash", (*_IPYKERNEL, _BASH_KERNEL), _bash),
        Language("javascript", _DENO, _deno, _DENO_ENV, transport="tcp", late=0.2),
        Language("typescript", _DENO, _deno, _DENO_ENV, transport="tcp", late=0.2),
    )
}
ALIASES = {"python3": "python", "js": "javascript", "ts": "typescript"}


def find(name: str | None) -> Language | None:
    """By name or alias, in any case; without a name Python."""
    wanted = (name or PYTHON.name).lower()
    return LANGUAGES.get(ALIASES.get(wanted, wanted))


def changes(base: Mapping[str, str], now: Mapping[str, str], wanted: Mapping[str, str]) -> Changes:
    """From the variables ``now`` on top of ``base`` to those ``wanted`` on top of it."""
    undone = {name: base.get(name) for name in now if name not in wanted}
    return undone | {name: value for name, value in wanted.items() if now.get(name) != value}
