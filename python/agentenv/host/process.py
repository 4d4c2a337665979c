"""Processes: short ones that we wait for, long ones that outlive us under a launcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any, Protocol

from agentenv.errors import InfraError, MissingTool


@dataclass(frozen=True, slots=True)
class Completed:
    """What a finished process left: exit status (negative: signal number) and its output."""

    status: int
    stdout: bytes
    stderr: bytes


class ProcessFailed(InfraError):
    """A tool ended with a non-zero status; its output is in the message."""

    code = "tool_failed"

    def __init__(self, argv: Sequence[str], done: Completed) -> None:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        super().__init__(
            f"{Path(argv[0]).name} ended with status {done.status}", why=" / ".join(lines[-5:])
        )
        self.argv, self.done = tuple(argv), done


async def run(
    argv: Sequence[str],
    *,
    stdin: bytes | None = None,
    timeout: float | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a short process to its end; kill it (and its session) on timeout or cancellation.

    Raises MissingTool if it cannot be found, ProcessFailed on a non-zero status when ``check``,
    TimeoutError after ``timeout`` seconds.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise MissingTool(f"{argv[0]} is not installed", fix="run: make setup") from error
    try:
        async with asyncio.timeout(timeout):
            out, err = await child.communicate(stdin)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await asyncio.shield(child.wait())
        raise
    done = Completed(child.returncode or 0, out, err)
    if check and done.status:
        raise ProcessFailed(argv, done)
    return done


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process that outlives whoever asked for it.

    ``name`` is unique with its launcher. Output is appended to ``log``. Before
    the program starts the child enters ``cgroups`` (paths of ``cgroup.procs``
    files), then ``netns`` (path), then drops to ``uid``/``gid`` without
    supplementary groups and with no_new_privs; it leads a session of its own.

    ``restart``: started again whenever it ends unasked (see ``Launcher.stop``), later and later
    if it ends soon, with the same descriptors. The launcher keeps these open until it forgets the
    name; the program must leave them at 3, 4, … so that a launcher that was killed itself can
    take them back. ``AENV_RESTARTS`` in its environment counts: 0 at the first start.

    ``pid_file``: the program is a starter, which ends with 0 when it has left the pid of the
    process that the name stands for in this file.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    env: dict[str, str] = field(default_factory=dict[str, str])
    cwd: str = "/"
    uid: int | None = None
    gid: int | None = None
    netns: Path | None = None
    cgroups: tuple[Path, ...] = ()
    restart: bool = False
    pid_file: Path | None = None


def spec_to_json(spec: ProcessSpec) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(spec), default=str))


def spec_from_json(raw: dict[str, Any]) -> ProcessSpec:
    values: dict[str, Any] = {
        **raw,
        "argv": tuple(raw["argv"]),
        "log": Path(raw["log"]),
        "netns": Path(raw["netns"]) if raw["netns"] else None,
        "cgroups": tuple(Path(item) for item in raw["cgroups"]),
        "pid_file": Path(raw["pid_file"]) if raw["pid_file"] else None,
    }
    return ProcessSpec(**values)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """``start_time`` is field 22 of /proc/PID/stat (clock ticks since boot), which tells a
    process from a later one of the same pid. ``exit_status`` is None while it runs, negative
    for a signal; ``lost`` says that it ended while no launcher watched, so the status is unknown.
    ``restarts`` counts how often it was started again; between its end and its next start the
    status is that of the end.
    """

    name: str
    pid: int
    start_time: int
    exit_status: int | None = None
    lost: bool = False
    restarts: int = 0

    @property
    def running(self) -> bool:
        return self.exit_status is None and not self.lost


class Launcher(Protocol):
    """Starts, watches and signals long-lived processes; implemented by ``host.supervised``."""

    async def ensure(self) -> None:
        """Bring the launcher up if it is not. Raises InfraError if it does not come up."""
        ...

    async def launch(self, spec: ProcessSpec, fds: Sequence[int] = ()) -> ProcessStatus:
        """Start; ``fds`` become 3, 4, … in the child. Raises Conflict if ``name`` runs already,
        InfraError if the program cannot be started. Without ``fds``, a ``restart`` process gets
        those that are kept of its stopped predecessor. One with a ``pid_file`` has been started
        by its starter when this returns, or has ended with the starter's status."""
        ...

    async def status(self, name: str) -> ProcessStatus | None: ...

    async def all(self) -> tuple[ProcessStatus, ...]: ...

    async def wait(self, name: str) -> ProcessStatus:
        """Return when the process has ended and will not be started again by itself. Raises
        NotFound for an unknown name."""
        ...

    async def signal(self, name: str, number: int) -> None:
        """Send a signal; a process that has ended already is a success. An end that comes of it
        counts as unasked: a ``restart`` process is started again."""
        ...

    async def stop(self, name: str, number: int = SIGTERM) -> None:
        """Send a signal and do not start it again; in a pause before a restart: call that off."""
        ...

    async def forget(self, name: str) -> None:
        """Drop the record of an ended process, close what is kept for it; unknown is a success."""
        ...


def cpu_seconds(pid: int) -> float | None:
    """CPU time that a process has used, its ended threads included; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> tuple[str, ...]:
    """What a process was started as; () if it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(raw.decode(errors="replace").rstrip("\0").split("\0"))


def replaced(pid: int) -> bool:
    """Whether the program's file is another one by now than the one that runs."""
    try:
        return str(Path(f"/proc/{pid}/exe").readlink()).endswith(" (deleted)")
    except OSError:
        return False


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
