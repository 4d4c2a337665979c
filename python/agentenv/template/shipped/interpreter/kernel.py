"""One Jupyter kernel: started, told to run code, interrupted, restarted, ended."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from .languages import Language
from .messages import Event, error, event_of

START_DEADLINE = 120.0  # seconds; an emulated machine may take some
LOOK_INTERVAL = 1.0  # seconds without a message, then whether the kernel lives is looked at


class KernelFailed(Exception):
    """A kernel does not start; in words for the user."""


class _Specs(KernelSpecManager):
    """Our table instead of files."""

    language: Language

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command, env = list(self.language.kernel), dict(self.language.env)
        return KernelSpec(argv=command, env=env, display_name=kernel_name, language=kernel_name)


class _Manager(Protocol):
    """The part of AsyncKernelManager that is used; its own types say nothing."""

    @property
    def has_kernel(self) -> bool: ...
    def client(self) -> AsyncKernelClient: ...
    async def start_kernel(self, *, cwd: str, env: dict[str, str]) -> None: ...
    async def is_alive(self) -> bool: ...
    async def interrupt_kernel(self) -> None: ...
    async def shutdown_kernel(self, *, now: bool) -> None: ...


class Kernel:
    """``start`` first. ``run`` one at a time; the rest at any time."""

    def __init__(self, language: Language, cwd: Path) -> None:
        self._language, self._cwd = language, cwd
        self._manager: _Manager | None = None
        self._client: AsyncKernelClient | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._running = False

    async def start(self, env: Mapping[str, str]) -> None:
        """Raises KernelFailed; nothing is left then."""
        specs = _Specs()
        specs.language = self._language
        self._folder = TemporaryDirectory(prefix="kernel-")  # short: a Unix socket's path is
        sockets = f"{self._folder.name}/s"
        untyped: Any = AsyncKernelManager(
            kernel_name=self._language.name,
            kernel_spec_manager=specs,
            connection_file=f"{self._folder.name}/connection.json",
            transport=self._language.transport,
            ip=sockets if self._language.transport == "ipc" else "127.0.0.1",
        )
        manager: _Manager = untyped
        self._manager = manager
        try:
            await manager.start_kernel(cwd=str(self._cwd), env=dict(env))
            self._client = manager.client()
            self._client.start_channels(stdin=False)
            async with asyncio.timeout(START_DEADLINE):
                await self._client.wait_for_ready()
                await _heard(self._client)
        except BaseException as failure:
            await self.shutdown()
            if isinstance(failure, OSError | RuntimeError):  # TimeoutError is one
                why = str(failure) or type(failure).__name__
                name = self._language.name
                raise KernelFailed(f"the {name} kernel does not start: {why}") from failure
            raise

    async def run(self, code: str, *, silent: bool = False) -> AsyncGenerator[Event]:
        """The events of one execution, to its end; the kernel's death is an error event.

        ``silent``: it is not counted, and shows no result.
        """
        client = self._client
        if client is None:
            raise KernelFailed(f"the {self._language.name} kernel does not run")
        self._running = True
        try:
            async for event in self._events(client, code, silent):
                yield event
        finally:
            self._running = False
            if self._client is not client:
                client.stop_channels()

    async def _events(
        self, client: AsyncKernelClient, code: str, silent: bool
    ) -> AsyncGenerator[Event]:
        request = client.execute(
            code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False
        )
        told = is_idle = False
        while True:
            try:
                pause = self._language.late if is_idle else LOOK_INTERVAL
                message = await client.get_iopub_msg(timeout=pause)
            except queue.Empty:
                if is_idle:
                    break
                if self._client is client and await self.alive():
                    continue
                yield error("KernelDied", f"the {self._language.name} kernel ended during the run")
                return
            # What a thread of an earlier cell says now is this one's: so a kernel names it.
            if _parent(message) != request:
                continue
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                is_idle = True
                if not self._language.late:
                    break
            if event := event_of(kind, content):
                told = told or kind == "error"
                yield event
        if (failure := await self._reply(client, request)) and not told:
            yield failure

    async def _reply(self, client: AsyncKernelClient, request: str) -> Event | None:
        """What the reply says of a failure: some kernels say it nowhere else."""
        with contextlib.suppress(queue.Empty):
            while True:
                message = await client.get_shell_msg(timeout=LOOK_INTERVAL)
                if _parent(message) != request:
                    continue
                content = message["content"]
                if content["status"] == "ok":
                    return None
                name, value = content.get("ename") or "Error", content.get("evalue") or ""
                return error(name, value, "\n".join(content.get("traceback") or ()))
        return None

    async def alive(self) -> bool:
        return self._manager is not None and await self._manager.is_alive()

    async def interrupt(self) -> None:
        if self._manager is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                await self._manager.interrupt_kernel()

    async def restart(self, env: Mapping[str, str]) -> None:
        """Anew, with nothing of what it held. Raises KernelFailed."""
        await self.shutdown()
        await self.start(env)

    async def shutdown(self) -> None:
        """One that does not run is success. A run notices soon, and then closes its channels."""
        client, self._client = self._client, None
        manager, self._manager = self._manager, None
        if client is not None and not self._running:
            client.stop_channels()
        if manager is not None and manager.has_kernel:
            await manager.shutdown_kernel(now=True)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


async def _heard(client: AsyncKernelClient) -> None:
    """Returns once we hear what the kernel publishes: it may be ready before, and what it says then
    would be lost."""
    while True:
        client.kernel_info()
        with contextlib.suppress(queue.Empty):
            await client.get_iopub_msg(timeout=LOOK_INTERVAL)
            return


def _parent(message: Mapping[str, Any]) -> str | None:
    return message["parent_header"].get("msg_id")
