"""A small process that is parent and subreaper of what must outlive the server.

Run as ``python -m agentenv.host.supervisor SOCKET``; one per socket, held by a lock. It serves
requests of one JSON line (descriptors by SCM_RIGHTS) and one JSON line in answer per connection:

    {"op": "launch", "spec": {...}}         -> status; descriptors become 3, 4, … in the child
    {"op": "status" | "wait" | "forget", "name": N} -> status or null
    {"op": "signal" | "stop", "name": N, "number": 15} -> null; "stop" asks for the end
    {"op": "all"}                                   -> [status, …]
    {"op": "quit"}                                  -> null; refused while a child runs

A record per process lies in ``SOCKET.d`` so that a supervisor that was killed
finds its children again (their exit status is then unknown: ``lost``). Processes that are
started again have a second one (see ``kept``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agentenv.concurrency import Tasks
from agentenv.errors import AgentEnvError, Conflict, InfraError, NotFound, UserError
from agentenv.host.kept import FIRST_FD, MAX_FDS, Kept, lift, take_back
from agentenv.host.process import ProcessSpec, ProcessStatus, spec_from_json, start_time

MAX_REQUEST = 1 << 20
FORGET_ENDED_ABOVE = 4096  # ended processes remembered until asked for; bounds memory
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(spec: ProcessSpec, fds: list[int]) -> Callable[[], None]:
    """What the child does between fork and exec; the order is that of ``ProcessSpec``."""

    def child() -> None:
        for procs in spec.cgroups:
            with procs.open("w") as file:
                file.write("0")
        if spec.netns is not None:
            netns = os.open(spec.netns, os.O_RDONLY | os.O_CLOEXEC)
            _checked(_libc.setns(netns, CLONE_NEWNET))
        # Received descriptors sit above the range they are moved to (see `lift`).
        for number, fd in enumerate(fds, FIRST_FD):
            os.dup2(fd, number, inheritable=True)
        if spec.gid is not None:
            os.setgroups([])
            os.setresgid(spec.gid, spec.gid, spec.gid)
        if spec.uid is not None:
            os.setresuid(spec.uid, spec.uid, spec.uid)
        _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))

    return child


class Supervisor:
    """Holds every process by name; all state changes happen on the event loop."""

    def __init__(self, records: Path) -> None:
        self.records = records
        self._known: dict[str, ProcessStatus] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self._children: dict[int, str] = {}
        self._kept: dict[str, Kept] = {}
        self._starters: dict[int, tuple[Path, asyncio.Event]] = {}

    def load(self) -> None:
        """Find the processes of an earlier supervisor again."""
        self.records.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(self.records.glob("*.json")):
            try:
                status = ProcessStatus(**json.loads(path.read_text()))
            except (ValueError, TypeError):
                path.unlink()  # half written by a supervisor that was killed before the launch
                continue
            self._remember(status)
            pid = status.pid if status.running else None
            if kept := take_back(self._kept_path(status.name), pid):
                self._kept[status.name] = kept
            if status.running:
                self._watch_foreign(status)
            else:
                self._settle(status.name)

    def launch(self, spec: ProcessSpec, fds: list[int]) -> ProcessStatus:
        known, kept = self._known.get(spec.name), self._kept.get(spec.name)
        if known is not None and (known.running or not self._ended[spec.name].is_set()):
            raise Conflict(f"process {spec.name} runs already", state="running", pid=known.pid)
        if spec.restart and not fds and kept is not None:
            fds = kept.fds
        status = self._start(spec, fds)
        self._ended.pop(spec.name, None)
        self._keep(spec, fds)
        self._remember(status)
        return status

    def _start(self, spec: ProcessSpec, fds: list[int], restarts: int = 0) -> ProcessStatus:
        env = spec.env or None
        if spec.restart:
            env = {**(spec.env or os.environ), "AENV_RESTARTS": str(restarts)}
        try:
            with spec.log.open("ab", buffering=0) as log:
                child = subprocess.Popen(
                    spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    cwd=spec.cwd,
                    pass_fds=tuple(range(FIRST_FD, FIRST_FD + len(fds))),
                    start_new_session=True,
                    preexec_fn=enter(spec, fds),  # noqa: PLW1509  (no threads here)
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise InfraError(
                f"{spec.argv[0]} could not be started", why=str(error), code="launch_failed"
            ) from error
        child.returncode = 0  # reaped by us: Popen must not wait for it
        self._children[child.pid] = spec.name
        if spec.pid_file:
            self._starters[child.pid] = spec.pid_file, asyncio.Event()
        return ProcessStatus(spec.name, child.pid, start_time(child.pid) or 0, restarts=restarts)

    def _keep(self, spec: ProcessSpec, fds: list[int]) -> None:
        """Hold what a restart needs, in place of what was held for the name before."""
        before = self._kept.pop(spec.name, None)
        self._kept_path(spec.name).unlink(missing_ok=True)
        if spec.restart:
            self._kept[spec.name] = kept = Kept(spec, [lift(os.dup(fd)) for fd in fds])
            kept.save(self._kept_path(spec.name))
        if before is not None:
            before.close()

    def _again(self, name: str) -> None:
        """The pause is over: start it again, or pause once more if that fails."""
        kept, status = self._kept[name], self._known[name]
        kept.pending, kept.started = None, time.monotonic()
        try:
            fresh = self._start(kept.spec, kept.fds, status.restarts + 1)
        except InfraError as error:
            print(error.message, file=sys.stderr, flush=True)  # noqa: T201  (the log)
            fresh = replace(status, restarts=status.restarts + 1)
        self._remember(fresh)
        if not fresh.running:
            self._settle(name)

    def reap(self) -> None:
        """Collect every ended child, ours and orphans that were re-parented to us."""
        while True:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._children.pop(pid, None)
            if name is not None and (status := self._known.get(name)) and status.pid == pid:
                self._has_ended(replace(status, exit_status=os.waitstatus_to_exitcode(raw)))

    def _has_ended(self, status: ProcessStatus) -> None:
        pid_file, started = self._starters.pop(status.pid, (None, None))
        if pid_file and status.exit_status == 0 and (follower := _left_by(pid_file)):
            pid, begun = follower
            self._children[pid] = status.name
            self._remember(ProcessStatus(status.name, pid, begun))
        else:
            self._finish(status)
        if started:
            started.set()

    async def started(self, status: ProcessStatus) -> ProcessStatus:
        """What became of it once its starter, if it has one, has ended."""
        _, started = self._starters.get(status.pid, (None, None))
        if started:
            await started.wait()
        return self._known.get(status.name, status)

    def signal(self, name: str, number: int) -> None:
        status = self._known.get(name)
        if status is None or not status.running:
            return
        with contextlib.suppress(ProcessLookupError), _pidfd(status.pid) as pidfd:
            if start_time(status.pid) == status.start_time:
                signal.pidfd_send_signal(pidfd, number)

    def stop(self, name: str, number: int) -> None:
        if kept := self._kept.get(name):
            was_due = kept.call_off()
            kept.save(self._kept_path(name))
            if was_due:
                self._settle(name)
        self.signal(name, number)

    def status(self, name: str) -> ProcessStatus | None:
        return self._known.get(name)

    def busy(self) -> bool:
        """Whether something runs or will."""
        return not all(event.is_set() for event in self._ended.values())

    def all(self) -> Iterable[ProcessStatus]:
        return self._known.values()

    async def wait(self, name: str) -> ProcessStatus:
        if name not in self._known:
            raise NotFound(f"no process {name}")
        await self._ended[name].wait()
        if name not in self._known:
            raise NotFound(f"process {name} was forgotten")
        return self._known[name]

    def forget(self, name: str) -> None:
        status = self._known.get(name)
        if status is None:
            return
        if status.running:
            raise Conflict(f"process {name} still runs", state="running")
        if kept := self._kept.pop(name, None):
            kept.close()
        self._ended.pop(name).set()
        del self._known[name]
        self._kept_path(name).unlink(missing_ok=True)
        self._record_path(name).unlink(missing_ok=True)

    def _remember(self, status: ProcessStatus) -> None:
        self._known[status.name] = status
        self._ended.setdefault(status.name, asyncio.Event())
        path = self._record_path(status.name)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(status)))
        fresh.rename(path)

    def _finish(self, status: ProcessStatus) -> None:
        self._remember(status)
        self._settle(status.name)

    def _settle(self, name: str) -> None:
        """It has ended: see to its next start, or tell who waits."""
        kept = self._kept.get(name)
        if kept is not None and not kept.asked:
            loop = asyncio.get_running_loop()
            kept.pending = loop.call_later(kept.next_pause(), self._again, name)
            return
        self._ended[name].set()
        ended = [name for name, event in self._ended.items() if event.is_set()]
        for old in ended[: max(0, len(ended) - FORGET_ENDED_ABOVE)]:
            self.forget(old)

    def _watch_foreign(self, status: ProcessStatus) -> None:
        """Watch a process that is not our child; its exit status will not be known."""
        try:
            pidfd = os.pidfd_open(status.pid)
        except ProcessLookupError:
            pidfd = -1
        if pidfd < 0 or start_time(status.pid) != status.start_time:
            if pidfd >= 0:
                os.close(pidfd)
            self._finish(replace(status, lost=True))
            return

        def ended() -> None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
            self._finish(replace(status, lost=True))

        asyncio.get_running_loop().add_reader(pidfd, ended)

    def _record_path(self, name: str) -> Path:
        return self.records / (name.replace("/", "@") + ".json")

    def _kept_path(self, name: str) -> Path:
        return self.records / (name.replace("/", "@") + ".spec")


def _left_by(pid_file: Path) -> tuple[int, int] | None:
    """Pid and start of the process that a starter left; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        if begun := start_time(pid):
            return pid, begun
    return None


@contextlib.contextmanager
def _pidfd(pid: int):
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


async def answer(supervisor: Supervisor, request: dict[str, Any], fds: list[int]) -> Any:
    """One request to its result, as plain JSON values."""
    match request:
        case {"op": "launch"}:
            status = supervisor.launch(spec_from_json(request["spec"]), fds)
            return asdict(await supervisor.started(status))
        case {"op": "status", "name": str(name)}:
            status = supervisor.status(name)
            return asdict(status) if status else None
        case {"op": "wait", "name": str(name)}:
            return asdict(await supervisor.wait(name))
        case {"op": "signal", "name": str(name), "number": int(number)}:
            return supervisor.signal(name, number)
        case {"op": "stop", "name": str(name), "number": int(number)}:
            return supervisor.stop(name, number)
        case {"op": "forget", "name": str(name)}:
            return supervisor.forget(name)
        case {"op": "all"}:
            return [asdict(status) for status in supervisor.all()]
        case {"op": "quit"}:
            if supervisor.busy():
                raise Conflict("processes still run", state="running")
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
            return None
        case _:
            raise UserError("unknown request to the supervisor", why=str(request)[:200])


async def serve_one(supervisor: Supervisor, connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    fds: list[int] = []
    with connection:
        connection.setblocking(False)
        try:
            request, fds = await _receive(connection)
            reply: dict[str, Any] = {"ok": await answer(supervisor, request, fds)}
        except AgentEnvError as error:
            reply = {"error": {"code": error.code, "message": error.what, "why": error.why}}
        except (ValueError, KeyError, TypeError) as error:
            reply = {"error": {"code": "invalid_request", "message": repr(error), "why": ""}}
        finally:
            for fd in fds:
                os.close(fd)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await loop.sock_sendall(connection, json.dumps(reply).encode() + b"\n")


async def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, fds = b"", list[int]()
    while not data.endswith(b"\n"):
        await _readable(connection)
        chunk, got, _, _ = socket.recv_fds(connection, 65536, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        fds += [lift(fd) for fd in got]
        data += chunk
        if not chunk or len(data) > MAX_REQUEST:
            raise ValueError("request cut off or too long")
    return json.loads(data), fds


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(connection)


async def main(path: Path) -> None:
    supervisor = Supervisor(path.with_name(path.name + ".d"))
    supervisor.load()
    loop, tasks, stop = asyncio.get_running_loop(), Tasks(), asyncio.Event()
    loop.add_signal_handler(signal.SIGCHLD, supervisor.reap)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)

        def accept() -> None:
            with contextlib.suppress(BlockingIOError):
                connection, _ = listener.accept()
                tasks.start(serve_one(supervisor, connection), "supervisor request")

        loop.add_reader(listener, accept)
        await stop.wait()
        path.unlink(missing_ok=True)
        await tasks.close()


def run() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    lock = os.open(
        path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another supervisor holds the socket: already so is success
    _checked(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    asyncio.run(main(path))


if __name__ == "__main__":
    run()
