"""takes the HTTP API of `api`, gives programs and the CLI typed calls; imports no server code.

``AgentEnv`` and ``Sandbox`` (`sandbox`) are for programs, `sync` the same without ``await``; below
them `commands`, `files`, `ports`, then `process` and `guest`, which speak with the guest's agent,
and `client`, which speaks with the server.
"""

from agentenv.sdk.commands import CommandFailed, CommandTimedOut, OutOfMemory, Result, Running
from agentenv.sdk.files import Change, Entry
from agentenv.sdk.process import Output, TerminalSize
from agentenv.sdk.sandbox import AgentEnv, Sandbox

__all__ = [
    "AgentEnv", "Change", "CommandFailed", "CommandTimedOut", "Entry", "OutOfMemory", "Output",
    "Result", "Running", "Sandbox", "TerminalSize",
]  # fmt: skip
