"""A cluster of one: the contract on this process's node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import agentenv
from agentenv.cluster import snapshots
from agentenv.cluster.contract import NodeInfo, SnapshotInfo
from agentenv.errors import AgentEnvError, InfraError
from agentenv.node.fork import fork
from agentenv.node.lineage import Lineage, lineage, lineages
from agentenv.node.node import Node
from agentenv.node.rollback import rollback
from agentenv.node.workshop import MARK
from agentenv.sandbox.logs import Entry, entries
from agentenv.sandbox.metrics import Sample
from agentenv.sandbox.network import Policy
from agentenv.sandbox.record import NewSandbox, SandboxInfo
from agentenv.sandbox.state import State
from agentenv.sandbox.suspend import How
from agentenv.store.records import ImageRow

LOG_LINES = 100_000  # of the console, which is bounded


class LocalCluster:
    """Implements ``Cluster``."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def create(self, request: NewSandbox) -> SandboxInfo:
        return await self._node.create(request)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return (await self._node.find(sandbox_id)).info

    async def list(self) -> Sequence[SandboxInfo]:
        seen = [info for info in self._node.list() if MARK not in info.metadata]
        return sorted(seen, key=lambda info: info.started_at, reverse=True)

    async def kill(self, sandbox_id: str) -> None:
        await self._node.kill(sandbox_id)

    async def set_timeout(self, sandbox_id: str, seconds: float) -> SandboxInfo:
        return await self._node.set_deadline(sandbox_id, seconds)

    async def connect(
        self, sandbox_id: str, seconds: float | None, *, memory: bool = True
    ) -> tuple[SandboxInfo, bool]:
        if seconds is None and (await self.get(sandbox_id)).state is State.RUNNING:
            seconds = self._node.config.sandbox_timeout
        return await self._node.resume(sandbox_id, seconds, memory=memory)

    async def pause(self, sandbox_id: str, how: How) -> None:
        await self._node.pause(sandbox_id, how)

    async def snapshot(self, sandbox_id: str, name: str | None, how: How) -> SnapshotInfo:
        return await snapshots.take(self._node, sandbox_id, name, how)

    async def fork(
        self, sandbox_id: str, count: int, seconds: float | None
    ) -> Sequence[SandboxInfo | AgentEnvError]:
        return await fork(self._node, sandbox_id, count, seconds)

    async def snapshots(
        self, sandbox_id: str | None = None, name: str | None = None
    ) -> Sequence[SnapshotInfo]:
        return await snapshots.find(self._node.records, sandbox_id, name)

    async def lineage(self, sandbox_id: str) -> Lineage:
        return await lineage(self._node, sandbox_id)

    async def lineages(self) -> Sequence[Lineage]:
        seen = {info.id for info in await self.list()}
        return [each for each in await lineages(self._node) if each.id in seen]

    async def rollback(self, sandbox_id: str, key: str | None) -> SandboxInfo:
        return await rollback(self._node, sandbox_id, key)

    async def set_network(
        self, sandbox_id: str, internet: bool, allow: tuple[str, ...], deny: tuple[str, ...]
    ) -> None:
        def change(policy: Policy) -> Policy:
            return replace(policy, internet=internet, allow_out=allow, deny_out=deny)

        await self._node.set_network(sandbox_id, change)

    async def metrics(self, sandbox_id: str, start: float, end: float) -> Sequence[Sample]:
        await self._node.inspect(sandbox_id)
        return await self._node.metrics.between(sandbox_id, start, end)

    async def logs(self, sandbox_id: str) -> Sequence[Entry]:
        info, _ = await self._node.inspect(sandbox_id)
        lines = await self._node.console(sandbox_id, LOG_LINES)
        return await asyncio.to_thread(entries, info, lines)

    async def inspect(self, sandbox_id: str) -> dict[str, Any]:
        info, objects = await self._node.inspect(sandbox_id)
        row = await self._node.records.image(info.image_id)
        return {
            **asdict(info),
            "access_token": None,  # only its owner's create and get answers carry them
            "traffic_token": None,
            "objects": objects,
            "image": (row.doc["config"] if row else None),
        }

    async def console(self, sandbox_id: str, lines: int) -> Sequence[str]:
        return await self._node.console(sandbox_id, lines)

    async def images(self) -> Sequence[ImageRow]:
        return await self._node.records.images()

    async def nodes(self) -> Sequence[NodeInfo]:
        node = self._node
        engines = node.ground.engines
        able = {name: asdict(each) for name, each in (await engines.capabilities()).items()}
        capabilities = {
            **able[engines.choice.engine],
            "reason": engines.choice.reason,
            "engines": able,
            "missing": dict(engines.missing),
        }
        running = [info for info in node.list() if info.state == "running"]
        warm = node.ground.warm
        load: dict[str, Any] = {
            "memory_mib": sum(info.resources.memory_mib for info in running),
            "warm": {"ready": warm.ready, "taken": warm.taken, "missed": warm.missed},
        }
        with suppress(InfraError):
            load["storage"] = await node.block_server.client.stats()
        return [NodeInfo(node.id, agentenv.__version__, capabilities, len(running), load)]
