"""Contexts: a kernel each, which keeps what cells left. One cell at a time, others wait."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from . import languages
from .kernel import Kernel, KernelFailed
from .languages import PYTHON, Language
from .messages import Event, end, error

log = logging.getLogger(__name__)

KEPT_EVENTS = 256  # that a slow client has not taken; then the cell waits for it
ASK_AGAIN = 5.0  # seconds until a cell that goes on is interrupted again
UNSEEN = frozenset({"PWD", "OLDPWD", "SHLVL", "_"})  # a shell's own


class NotThere(Exception):
    """No context of that id, no such language or folder; in words for the user."""


class Stage(enum.Enum):
    """Of a cell; LEFT: nobody listens, and it had not begun."""

    WAITING = enum.auto()
    LEFT = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    OVER = enum.auto()


class Execution:
    """One cell as its client sees it. ``leave`` when nobody listens any more: it is interrupted."""

    def __init__(self, context: Context, code: str, env: Mapping[str, str]) -> None:
        self._context, self._code, self._env = context, code, env
        self._events = asyncio.Queue[Event | None](KEPT_EVENTS)
        self._stage = Stage.WAITING

    async def events(self) -> AsyncGenerator[Event]:
        while (event := await self._events.get()) is not None:
            yield event

    async def perform(self) -> None:
        try:
            async with self._context.turn:
                if self._stage is Stage.WAITING:
                    await self._run()
        except KernelFailed as failure:
            await self._events.put(error("KernelFailed", str(failure)))
        except Exception as failure:
            log.exception("a cell was not run to its end")
            await self._events.put(error("InternalError", repr(failure)))
        await self._events.put(end())
        await self._events.put(None)
        self._stage = Stage.OVER

    async def _run(self) -> None:
        self._stage = Stage.RUNNING
        try:
            async for event in self._context.cell(self._code, self._env):
                await self._events.put(event)
        finally:
            self._stage = Stage.ENDING

    async def leave(self) -> None:
        """Returns when the cell has ended, or is sure not to begin."""
        if self._stage is Stage.WAITING:
            self._stage = Stage.LEFT
        while self._stage in (Stage.RUNNING, Stage.ENDING):
            if self._stage is Stage.RUNNING:
                await self._context.kernel.interrupt()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN):
                    await self._drain()

    async def _drain(self) -> None:
        while await self._events.get() is not None:
            pass


class Context:
    """``env``: what its kernel began with."""

    def __init__(self, context_id: str, language: Language, cwd: Path) -> None:
        self.id, self.language, self.cwd = context_id, language, cwd
        self.turn = asyncio.Lock()
        self.kernel = Kernel(language, cwd)
        self._base: Mapping[str, str] = dict(os.environ)
        self._env: Mapping[str, str] = {}

    def shown(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language.name, "cwd": str(self.cwd)}

    async def start(self) -> None:
        await self.kernel.start(self._base)

    async def warm_up(self) -> None:
        if self.language.warm:
            async with self.turn:
                await self._unseen(self.language.warm)

    async def cell(self, code: str, env: Mapping[str, str]) -> AsyncGenerator[Event]:
        """In its turn. A kernel that died before is started anew."""
        if not await self.kernel.alive():
            await self.restart()
        await self._set(env)
        async for event in self.kernel.run(code):
            yield event

    async def _set(self, env: Mapping[str, str]) -> None:
        wanted = {name: value for name, value in env.items() if name not in UNSEEN}
        if changes := languages.changes(self._base, self._env, wanted):
            await self._unseen(self.language.assign(changes))
            self._env = wanted

    async def _unseen(self, code: str) -> None:
        async for _ in self.kernel.run(code, silent=True):
            pass

    async def restart(self) -> None:
        """At any time: a cell that runs ends with an error. Raises KernelFailed."""
        self._env = {}
        await self.kernel.restart(self._base)


class Contexts:
    """``tasks`` runs what outlives a request. ``home`` is where contexts begin that name no folder.

    Without an id a language's own context is meant, made when it is first asked for.
    """

    def __init__(self, tasks: asyncio.TaskGroup, home: Path) -> None:
        self._tasks, self._home = tasks, home
        self._contexts: dict[str, Context] = {}
        self._own: dict[str, Context] = {}
        self._making = asyncio.Lock()

    async def start(self) -> None:
        """Python's own, ready and warm."""
        await (await self._default(PYTHON)).warm_up()

    async def close(self) -> None:
        for context in list(self._contexts.values()):
            await context.kernel.shutdown()
        self._contexts.clear()

    def all(self) -> list[Context]:
        return list(self._contexts.values())

    async def create(self, language: str | None, cwd: str | None) -> Context:
        """Raises NotThere, KernelFailed."""
        return await self._make(_language(language), self._home / (cwd or ""))

    async def _make(self, language: Language, cwd: Path) -> Context:
        if not cwd.is_dir():
            raise NotThere(f"'{cwd}' is no folder")
        context = Context(str(uuid.uuid4()), language, cwd)
        await context.start()
        self._contexts[context.id] = context
        return context

    async def _default(self, language: Language) -> Context:
        async with self._making:
            if language.name not in self._own:
                self._own[language.name] = await self._make(language, self._home)
            return self._own[language.name]

    def find(self, context_id: str) -> Context:
        """Raises NotThere."""
        if context_id not in self._contexts:
            raise NotThere(f"context '{context_id}' not found")
        return self._contexts[context_id]

    async def remove(self, context_id: str) -> None:
        """Raises NotThere."""
        context = self.find(context_id)
        del self._contexts[context_id]
        if self._own.get(context.language.name) is context:
            del self._own[context.language.name]
        await context.kernel.shutdown()

    async def execute(
        self, code: str, context_id: str | None, language: str | None, env: Mapping[str, str]
    ) -> Execution:
        """Begun, or waiting its turn. Raises NotThere, KernelFailed."""
        if context_id is not None:
            context = self.find(context_id)
        else:
            context = await self._default(_language(language))
        execution = Execution(context, code, env)
        self._tasks.create_task(execution.perform())
        return execution

    def leave(self, execution: Execution) -> None:
        self._tasks.create_task(execution.leave())


def _language(name: str | None) -> Language:
    found = languages.find(name)
    if found is None:
        known = ", ".join(languages.LANGUAGES)
        raise NotThere(f"language '{name}' is not supported; there are: {known}")
    return found
