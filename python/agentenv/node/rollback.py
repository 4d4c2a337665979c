"""Back to a snapshot of a sandbox's own line."""

from __future__ import annotations

from agentenv.errors import Conflict, UserError
from agentenv.node.lineage import SOURCE, Kind, family
from agentenv.node.node import Node
from agentenv.sandbox.record import SandboxInfo
from agentenv.store.records import READY
from agentenv.template.named import find_build


async def rollback(node: Node, sandbox_id: str, key: str | None) -> SandboxInfo:
    """Put a running sandbox back to the snapshot that ``key`` (id, name, ``name:tag``) means, or
    to its last: taken of it by request, or the one that its machine was restored from.

    Raises Conflict (``other_lineage``, ``no_snapshot``), and as ``Sandbox.rollback``.
    """
    info = (await node.find(sandbox_id)).info
    snapshot_id = await _meant(node, key) if key else await _last(node, info)
    await _of_its_line(node, info, snapshot_id, key or snapshot_id)
    return await node.rollback(sandbox_id, snapshot_id)


async def _meant(node: Node, key: str) -> str:
    found = await find_build(node.records, key)
    if found is None:
        return key
    build = found[1]
    if build.status != READY or build.snapshot_id is None:
        raise UserError(f"'{key}' is no snapshot", why="sandboxes of it are booted")
    return build.snapshot_id


async def _last(node: Node, info: SandboxInfo) -> str:
    """Snapshots that a fork or a pause left are not meant, but for the one it came back from."""
    taken = {
        build.snapshot_id
        for build in await node.records.builds(status=READY)
        if build.doc.get(SOURCE) == info.id
    }
    candidates = [each for each in node.ground.snapshots.all() if each.id in taken]
    if info.snapshot_id and (under := node.ground.snapshots.known(info.snapshot_id)):
        candidates.append(under)
    if not candidates:
        raise Conflict(
            f"sandbox {info.id} has no snapshot to go back to",
            why="it was booted, and none was taken of it",
            fix="take one: aenv snapshot ID",
            code="no_snapshot",
            state=str(info.state.shown),
        )
    return max(candidates, key=lambda each: each.created).id


async def _of_its_line(node: Node, info: SandboxInfo, snapshot_id: str, called: str) -> None:
    if snapshot_id == info.snapshot_id:
        return
    manifest = await node.ground.snapshots.find(snapshot_id)
    ancestors = (await family(node)).ancestors(info.id)
    line = {info.id, *(each.id for each in ancestors if each.kind is Kind.SANDBOX)}
    if manifest.sandbox_id not in line:
        raise Conflict(
            f"sandbox {info.id} cannot become what {called} is",
            why="that is no snapshot of it, nor of a sandbox that it came from",
            fix=f"start another one: aenv start {called}",
            code="other_lineage",
            state=str(info.state.shown),
        )
