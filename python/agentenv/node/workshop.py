"""The sandboxes that templates are built in: as any other, but for nobody to see."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from agentenv.errors import NotFound
from agentenv.model import Guest, Resources
from agentenv.node.node import Node
from agentenv.node.origin import made_by
from agentenv.sandbox.record import NewSandbox, SandboxInfo
from agentenv.sandbox.sandbox import utcnow
from agentenv.sandbox.state import State
from agentenv.sandbox.suspend import How
from agentenv.snapshot.manifest import misfit
from agentenv.template.build import Size

MARK = "agentenv.build"
"""In the metadata of a sandbox that belongs to a build."""
LIFETIME = timedelta(hours=4)  # a build ends before
STEPS_ROOM = 2048  # MiB that a build's steps may write beside what shall be left free


class NodeWorkshop:
    """Implements ``Workshop``."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def sizes(self, asked: Mapping[str, Any]) -> Size:
        """What was asked for, the rest as the node has it. ``free_mib`` is what the disk shall have
        left when the build is done: room is made ahead. Raises UserError."""
        given = {name: value for name, value in asked.items() if name != "free_mib"}
        engine = self._node.ground.engines.asked(given.get("engine"))
        wanted = await self._node.resources(NewSandbox("", **given))
        free = asked.get("free_mib", 0)
        if "disk_mib" in asked or free + STEPS_ROOM <= wanted.disk_mib:
            return Size(wanted, engine)
        disk = -(-(free + STEPS_ROOM) // STEPS_ROOM) * STEPS_ROOM
        return Size(replace(wanted, disk_mib=disk), engine)

    async def begin(
        self,
        image_id: str | None,
        snapshot_id: str | None,
        resources: Resources,
        guest: Guest,
        engine: str,
    ) -> SandboxInfo:
        now = utcnow()
        info = SandboxInfo(
            id=self._node.new_id(),
            state=State.CREATING,
            template_id=MARK,
            build_id="",
            image_id=image_id or "",
            snapshot_id=snapshot_id,
            disk_id=snapshot_id,
            started_at=now,
            end_at=now + LIFETIME,
            resources=resources,
            guest=guest,
            engine=engine,
            access_token=secrets.token_hex(32),
            metadata={MARK: ""},
        )
        if snapshot_id is None:
            return await self._node.bring_up(info)
        async with self._node.ground.snapshots.held(snapshot_id) as manifest:
            made_by(manifest, engine)
            size = replace(resources, disk_mib=manifest.resources.disk_mib)
            changes = {
                "image_id": manifest.image_id,
                "resources": size,
                "from_disk": size != manifest.resources,
            }
            return await self._node.bring_up(info.with_(**changes))

    @asynccontextmanager
    async def capture(self, sandbox_id: str) -> AsyncGenerator[str]:
        async with self._node.taking(sandbox_id, How()) as manifest:
            yield manifest.id

    async def end(self, sandbox_id: str) -> None:
        try:
            await self._node.kill(sandbox_id)
        except NotFound:
            return

    async def usable(self, snapshot_id: str, engine: str) -> bool:
        found = self._node.ground.snapshots.known(snapshot_id)
        if found is None:
            return False
        here = await self._node.ground.engine(engine).features()
        return misfit(found.features, asdict(here)) is None

    def tidy(self) -> None:
        self._node.ground.snapshots.tidy()

    async def sweep(self) -> None:
        for info in self._node.list():
            if MARK in info.metadata:
                await self.end(info.id)
