"""The SDK without `await`: a thin face that drives the asynchronous one in a thread of its own.

``with AgentEnv() as env, env.start("base") as sandbox: sandbox.commands.run("ls")`` — names,
arguments and errors are those of ``agentenv.sdk.sandbox``; generators become iterators.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from agentenv.errors import UserError
from agentenv.sdk.commands import Commands, Running
from agentenv.sdk.files import Files
from agentenv.sdk.ports import Ports
from agentenv.sdk.sandbox import AgentEnv as AsyncAgentEnv
from agentenv.sdk.sandbox import Sandbox

_FACED = (AsyncAgentEnv, Sandbox, Commands, Running, Files, Ports)


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="agentenv-sdk", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Awaitable[Any]) -> Any:
        """Wait for ``work``; an interrupt meanwhile cancels it."""
        future = asyncio.run_coroutine_threadsafe(_awaited(work), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def must_be_open(self) -> None:
        """Raises UserError."""
        if self._loop.is_closed():
            raise UserError("this AgentEnv was closed", fix="open another one")

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


class Face:
    """Stands for an object of the asynchronous SDK."""

    def __init__(self, loop: _Loop, target: Any) -> None:
        self._loop, self._target = loop, target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return _blocking(self._loop, found) if callable(found) else _faced(self._loop, found)

    def __enter__(self) -> Any:
        return _faced(self._loop, self._loop.run(self._target.__aenter__()))

    def __exit__(self, *what: Any) -> Any:
        return self._loop.run(self._target.__aexit__(*what))

    def __iter__(self) -> Iterator[Any]:
        return _iterate(self._loop, self._target.__aiter__())


class AgentEnv(Face):
    """``with AgentEnv() as env``; arguments as of the asynchronous one."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        loop = _Loop()
        try:
            target = loop.run(_made(lambda: AsyncAgentEnv(url, key)))
        except BaseException:
            loop.close()
            raise
        super().__init__(loop, target)

    def __exit__(self, *what: Any) -> Any:
        try:
            return super().__exit__(*what)
        finally:
            self._loop.close()


async def _made(make: Callable[[], Any]) -> Any:
    return make()  # in the loop's thread, to which its connections belong


def _blocking(loop: _Loop, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*words: Any, **named: Any) -> Any:
        loop.must_be_open()
        return _faced(loop, function(*words, **named))

    return call


def _faced(loop: _Loop, value: Any) -> Any:
    if isinstance(value, Coroutine):
        return _faced(loop, loop.run(cast("Coroutine[Any, Any, Any]", value)))
    if isinstance(value, AsyncGenerator):
        return _iterate(loop, cast("AsyncGenerator[Any, Any]", value))
    if isinstance(value, (*_FACED, AbstractAsyncContextManager)):
        return Face(loop, value)
    if isinstance(value, list):
        return [_faced(loop, each) for each in cast("list[Any]", value)]
    return value


def _iterate(loop: _Loop, source: AsyncIterator[Any]) -> Iterator[Any]:
    try:
        while True:
            try:
                yield loop.run(source.__anext__())
            except StopAsyncIteration:
                return
    finally:
        if isinstance(source, AsyncGenerator):
            loop.run(source.aclose())
