"""Copies of a running sandbox: one snapshot, restored as often as asked, all at once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from datetime import timedelta

from agentenv.errors import AgentEnvError
from agentenv.node.node import Node
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.sandbox import utcnow
from agentenv.sandbox.state import State
from agentenv.sandbox.suspend import How
from agentenv.snapshot.manifest import Manifest


async def fork(
    node: Node, sandbox_id: str, count: int, seconds: float | None
) -> Sequence[SandboxInfo | AgentEnvError]:
    """``count`` sandboxes with ids, tokens and randomness of their own; each is there or failed.

    Raises as ``Node.snapshot`` if the source cannot be saved: then there is none.
    """
    source = (await node.find(sandbox_id)).info
    lifetime = timedelta(seconds=seconds or node.config.sandbox_timeout)
    async with node.taking(sandbox_id, How()) as manifest:
        children = [child(node.new_id(), source, manifest, lifetime) for _ in range(count)]
        made = await asyncio.gather(
            *(node.bring_up(info) for info in children), return_exceptions=True
        )
    outcome: list[SandboxInfo | AgentEnvError] = []
    for one in made:
        if isinstance(one, BaseException) and not isinstance(one, AgentEnvError):
            raise one
        outcome.append(one)
    return outcome


def child(
    sandbox_id: str, source: SandboxInfo, manifest: Manifest, lifetime: timedelta
) -> SandboxInfo:
    """The record of a copy: all that its owner chose for the source, nothing that is its own."""
    now = utcnow()
    return SandboxInfo(
        id=sandbox_id,
        state=State.CREATING,
        template_id=source.template_id,
        build_id=source.build_id,
        image_id=manifest.image_id,
        snapshot_id=manifest.id,
        disk_id=manifest.id,
        started_at=now,
        end_at=now + lifetime,
        resources=manifest.resources,
        guest=source.guest,
        engine=manifest.engine,
        alias=source.alias,
        access_token=secrets.token_hex(32) if source.access_token else None,
        traffic_token=secrets.token_hex(32) if source.traffic_token else None,
        network=source.network,
        lifecycle=source.lifecycle,
        origin=source.id,
        metadata=source.metadata,
    )
