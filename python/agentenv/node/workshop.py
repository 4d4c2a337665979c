"""The sandboxes that templates are built in: as any other, but for nobody to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from agentenv.errors import NotFound
from agentenv.model import Resources
from agentenv.node.node import Node
from agentenv.sandbox.record import Guest, NewSandbox, SandboxInfo

MARK = "agentenv.build"
"""In the metadata of a sandbox that belongs to a build."""
STEPS_ROOM = 2048  # MiB that a build's steps may write beside what shall be left free
LIFETIME = 4 * 3600.0  # seconds; a build ends before


class NodeWorkshop:
    """Implements ``Workshop``."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def sizes(self, asked: Mapping[str, int]) -> Resources:
        """What was asked for, the rest as the node has it. ``free_mib`` is what the disk shall have
        left when the build is done: room is made ahead. Raises UserError."""
        given = {name: value for name, value in asked.items() if name != "free_mib"}
        wanted = await self._node.resources(NewSandbox("", **cast("dict[str, Any]", given)))
        free = asked.get("free_mib", 0)
        if "disk_mib" in asked or free + STEPS_ROOM <= wanted.disk_mib:
            return wanted
        return replace(wanted, disk_mib=-(-(free + STEPS_ROOM) // STEPS_ROOM) * STEPS_ROOM)

    async def begin(
        self, image_id: str | None, snapshot_id: str | None, resources: Resources, guest: Guest
    ) -> SandboxInfo:
        assert image_id is not None, snapshot_id
        image = await self._node.catalog.find(image_id)
        request = NewSandbox(
            template=image.reference,
            timeout=LIFETIME,
            metadata={MARK: "yes"},
            env=guest.env,
            **_sizes(resources),
        )
        return await self._node.create(request)

    async def capture(self, sandbox_id: str) -> str:
        raise NotImplementedError(sandbox_id)

    async def end(self, sandbox_id: str) -> None:
        try:
            await self._node.kill(sandbox_id)
        except NotFound:
            return

    async def usable(self, snapshot_id: str) -> bool:
        return False

    async def forget(self, snapshot_id: str) -> None:
        pass

    async def sweep(self) -> None:
        for info in self._node.list():
            if MARK in info.metadata:
                await self.end(info.id)


def _sizes(resources: Resources) -> Mapping[str, Any]:
    return asdict(resources)
