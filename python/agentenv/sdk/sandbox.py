"""The SDK's front: `AgentEnv` makes and finds sandboxes, `Sandbox` is one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv import config
from agentenv.errors import AgentEnvError, NotFound
from agentenv.sdk.client import Address, Client
from agentenv.sdk.commands import Commands
from agentenv.sdk.diff import Difference, diff
from agentenv.sdk.files import Files
from agentenv.sdk.guest import Guest
from agentenv.sdk.ports import Ports
from agentenv.sdk.process import Processes


class Sandbox:
    """A sandbox that runs or is paused. ``async with`` ends it on the way out.

    Its methods raise UserError for what you must change, ImageError for the image's faults,
    GuestError for the guest's, InfraError for the node's.
    """

    def __init__(self, client: Client, made: Mapping[str, Any]) -> None:
        guest = Guest(client, made)
        self._client = client
        self.id = guest.sandbox_id
        self.commands = Commands(Processes(client, made))
        self.files = Files(guest)
        self.ports = Ports(guest, made.get("domain"))
        #: What private ports (``network={"allowPublicTraffic": False}``) ask for.
        self.traffic_token: str | None = made.get("trafficAccessToken")

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> bool:
        """End it; False if it has ended already."""
        try:
            await self._client.kill(self.id)
        except NotFound:
            return False
        return True

    async def extend(self, seconds: int) -> None:
        """Have it live ``seconds`` from now on, which may be shorter than before."""
        await self._client.set_timeout(self.id, seconds)

    async def pause(self, *, memory: bool = True) -> None:
        """Keep it, with its memory or its disk alone, and nothing that runs."""
        await self._client.pause(self.id, memory=memory)

    async def resume(self, timeout: int | None = None, *, memory: bool = True) -> bool:
        """Have it run again; False if it did not stand still. Without ``memory`` it is booted
        from its disk. Without ``timeout`` (seconds) it has the lifetime it had before."""
        _, resumed = await self._client.connect(self.id, timeout, memory=memory)
        return resumed

    async def snapshot(self, name: str | None = None, *, memory: bool = True) -> str:
        """Save it as it runs, which it goes on doing; what ``start`` makes sandboxes from."""
        made = await self._client.snapshot(self.id, name, memory=memory)
        return str(made["snapshotID"])

    async def fork(
        self, count: int = 1, timeout: int | None = None
    ) -> list[Sandbox | AgentEnvError]:
        """Copies with ids and randomness of their own, which live for ``timeout`` seconds (300
        without). In the place of one that could not be made is its error."""
        made = await self._client.fork(self.id, count, timeout)
        return [
            each if isinstance(each, AgentEnvError) else Sandbox(self._client, each)
            for each in made
        ]

    async def rollback(self, snapshot_id: str | None = None) -> None:
        """Put it back to a snapshot of it or of a sandbox that it came from; without one to the
        last. If that fails it runs on as before."""
        await self._client.rollback(self.id, snapshot_id)

    async def lineage(self) -> dict[str, Any]:
        """Its ancestors (nearest first), children, and the bytes that it holds alone."""
        return await self._client.lineage(self.id)

    async def info(self) -> dict[str, Any]:
        """As the API answers: state, times, sizes, metadata, network."""
        return await self._client.sandbox(self.id)

    async def metrics(self) -> list[dict[str, Any]]:
        """Samples of the last hour, oldest first."""
        return await self._client.metrics(self.id)

    async def set_network(
        self,
        *,
        internet: bool = True,
        allow: Sequence[str] = (),
        deny: Sequence[str] = (),
    ) -> None:
        """Replace what it may reach: addresses and ranges; ``allow`` wins over ``deny``."""
        await self._client.set_network(self.id, internet=internet, allow=allow, deny=deny)


class AgentEnv(Client):
    """``async with AgentEnv() as env``: the server of ``AENV_URL``, or of the local home."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        local = config.load({})
        if url and key:
            super().__init__(Address(url, key))
        else:
            super().__init__(Address.find(url, local.home, local.listen, local.scheme))

    async def start(self, template: str = "base", **options: Any) -> Sandbox:
        """A new sandbox; ``options`` as of ``create``: timeout, auto_pause, auto_resume, envVars,
        metadata, network, …"""
        return Sandbox(self, await self.create(template, **options))

    async def open(self, sandbox_id: str) -> Sandbox:
        """One that runs or is paused. Raises NotFound, saying why one ended that lived lately."""
        return Sandbox(self, await self.sandbox(sandbox_id))

    async def diff(
        self, one: str, other: str | None = None, *, checksum: bool = False
    ) -> Sequence[Difference]:
        """Files that differ between two sandboxes or snapshots. See ``sdk.diff.diff``."""
        return await diff(self, one, other, checksum=checksum)

    async def resume(
        self, sandbox_id: str, timeout: int | None = None, *, memory: bool = True
    ) -> Sandbox:
        """One that runs or is paused, running. See ``Sandbox.resume``."""
        found, _ = await self.connect(sandbox_id, timeout, memory=memory)
        return Sandbox(self, found)
