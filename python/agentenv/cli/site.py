"""The inside of a sandbox that a template is built in, through our own SDK and the data plane.

The public road is taken (the edge's listener, the sandbox's token) since all that follows commands
and carries trees is there already, and a broken connection is explained; it is a loopback hop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from agentenv.config import Config
from agentenv.errors import NotFound
from agentenv.sandbox.record import SandboxInfo
from agentenv.sdk.client import Address, Client
from agentenv.sdk.commands import exit_code
from agentenv.sdk.files import CHUNK, Files
from agentenv.sdk.guest import Guest
from agentenv.sdk.process import Ended, Processes
from agentenv.sdk.process import Output as Printed
from agentenv.template.ground import Exit, Output, Site, Sites

ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104


class SdkSite:
    """Implements ``Site``; paths are absolute."""

    def __init__(self, client: Client, made: Mapping[str, str | None]) -> None:
        self._guest = Guest(client, made)
        self._files = Files(self._guest)
        self._processes = Processes(client, made)

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, user: str
    ) -> AsyncGenerator[Output | Exit]:
        events = self._processes.start(tuple(argv), env=env, cwd=cwd, user=user)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Printed):
                    yield Output(event.stream, event.data)
                elif isinstance(event, Ended):
                    yield Exit(exit_code(event), event.status, event.out_of_memory)

    async def read(self, path: str) -> bytes | None:
        try:
            return await self._files.read(path)
        except NotFound as error:
            return _absent(error)

    async def kind(self, path: str) -> str | None:
        try:
            return (await self._files.stat(path)).kind
        except NotFound as error:
            return _absent(error)

    async def names(self, folder: str) -> Sequence[str]:
        return [entry.name for entry in await self._files.list(folder)]

    async def make_folder(self, path: str, user: str) -> None:
        await self._files.make_dir(path, user=user)

    async def pack(self, path: str) -> AsyncGenerator[bytes]:
        async with self._guest.open("GET", "/archive", params={"path": path}) as response:
            async for piece in response.aiter_raw(CHUNK):
                yield piece

    async def unpack(self, folder: str, archive: AsyncIterable[bytes]) -> None:
        await self._guest.request("POST", "/archive", params={"path": folder}, content=archive)


def _absent(error: NotFound) -> None:
    """Nothing there, unless it is the sandbox itself that is gone."""
    if error.code != "not_found":
        raise error


def sites(config: Config, key: str) -> Sites:
    """Of the sandboxes behind this server's own listener."""
    host, _, port = config.listen.rpartition(":")
    address = Address(f"{config.scheme}://{ANY_HOST.get(host, host)}:{port}", key)

    @asynccontextmanager
    async def opened(info: SandboxInfo) -> AsyncGenerator[Site]:
        # Our own listener, whose certificate is for the names that others use.
        async with Client(address, verify=False) as client:
            yield SdkSite(client, {"sandboxID": info.id, "envdAccessToken": info.access_token})

    def site(info: SandboxInfo) -> AbstractAsyncContextManager[Site]:
        return opened(info)

    return site
