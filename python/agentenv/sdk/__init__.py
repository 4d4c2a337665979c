"""takes the HTTP API of `api`, gives programs and the CLI typed calls; imports no server code.

``AgentEnv`` and ``Sandbox`` (`sandbox`) are for programs, `sync` the same without ``await``; below
them `commands`, `files`, `ports`, then `process` and `guest`, which speak with the guest's agent,
and `client`, which speaks with the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentenv.sdk.commands import CommandFailed, CommandTimedOut, OutOfMemory, Result, Running
    from agentenv.sdk.files import Change, Entry
    from agentenv.sdk.process import Output, TerminalSize
    from agentenv.sdk.sandbox import AgentEnv, Sandbox

_HOMES = {
    "commands": ("CommandFailed", "CommandTimedOut", "OutOfMemory", "Result", "Running"),
    "files": ("Change", "Entry"),
    "process": ("Output", "TerminalSize"),
    "sandbox": ("AgentEnv", "Sandbox"),
}

__all__ = [
    "AgentEnv", "Change", "CommandFailed", "CommandTimedOut", "Entry", "OutOfMemory", "Output",
    "Result", "Running", "Sandbox", "TerminalSize",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Load what is asked for: most verbs of the CLI need `client` only."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"agentenv.sdk.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
