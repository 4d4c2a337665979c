"""Does gVisor run a program here? Found by running one: its system calls may be forbidden."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from agentenv.engine.gvisor.bundle import PLATFORM, apart, hidden_sysctls
from agentenv.errors import InfraError
from agentenv.host.process import ProcessFailed, run

DEADLINE = 20.0  # seconds; 0.2 measured


async def must_run(program: Path) -> None:
    """Raises MissingTool, InfraError (``engine_failed``)."""
    with tempfile.TemporaryDirectory(prefix="aenv-runsc-") as state:
        flags = (f"--root={state}", f"--platform={PLATFORM}", "--ignore-cgroups", "--network=none")
        line = shlex.join((str(program), *flags, "do", "true"))
        words = apart(f"{hidden_sysctls()}exec {line}")
        try:
            await run(words, timeout=DEADLINE)
        except (ProcessFailed, TimeoutError) as error:
            raise InfraError(
                "gVisor runs nothing here", why=str(error), code="engine_failed"
            ) from error
