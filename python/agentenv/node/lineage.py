"""Where sandboxes come from, what came from them, and what each holds alone: told from records."""

from __future__ import annotations

import asyncio
import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentenv.node.node import Node, not_found, readable
from agentenv.sandbox.launch import disk_of
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import State
from agentenv.snapshot.manifest import Element, Manifest
from agentenv.store.records import BuildRow, TemplateRow
from agentenv.template.named import called

SOURCE = "sandbox_id"
"""Names the sandbox in the record of a build that is a snapshot."""


class Kind(enum.StrEnum):
    SANDBOX = "sandbox"
    SNAPSHOT = "snapshot"
    TEMPLATE = "template"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class Relative:
    """One of a line; ``state`` is that of a sandbox which is still recorded."""

    kind: Kind
    id: str
    state: State | None = None


@dataclass(frozen=True, slots=True)
class Own:
    """Bytes that are held for one sandbox and its descendants alone: in saved layers, and in the
    disk that it writes to now."""

    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """``ancestors``: nearest first, ``parent`` is the first; ``snapshot``: what its memory lies
    over, or what it is paused in."""

    id: str
    state: State
    snapshot: str | None
    parent: Relative | None
    ancestors: tuple[Relative, ...]
    children: tuple[Relative, ...]
    own: Own


class Family:
    """Who descends from whom. Pure."""

    def __init__(
        self,
        sandboxes: Iterable[SandboxInfo],
        templates: Iterable[TemplateRow],
        builds: Iterable[BuildRow],
        manifests: Iterable[Manifest],
    ) -> None:
        self.sandboxes = {info.id: info for info in sandboxes}
        self._builds = {build.id: build for build in builds}
        self._names = _names(templates)
        self._manifests = {each.id: each for each in manifests}
        self._children: dict[str, list[str]] = defaultdict(list)
        for info in self.sandboxes.values():
            for step in self._steps(info):
                if step.kind is Kind.SANDBOX:
                    self._children[step.id].append(info.id)
        self._holders: dict[Element, set[str]] = defaultdict(set)
        for each in self._manifests.values():
            for element in (*each.disk, *(each.memory or ())):
                self._holders[element].add(each.sandbox_id)

    def ancestors(self, sandbox_id: str) -> tuple[Relative, ...]:
        """To the template or image at its root, or as far as is still recorded."""
        line: list[Relative] = []
        info = self.sandboxes.get(sandbox_id)
        while info:
            steps = self._steps(info)
            line += steps
            last = steps[-1]
            info = self.sandboxes.get(last.id) if last.kind is Kind.SANDBOX else None
        return tuple(line)

    def children(self, sandbox_id: str) -> tuple[Relative, ...]:
        """Its forks and those made from its snapshots."""
        return tuple(self._sandbox(each) for each in self._children.get(sandbox_id, ()))

    def own(self, sandbox_id: str) -> tuple[set[Element], set[Element]]:
        """Parts of its snapshots' memories and disks that no snapshot of another has, but for its
        descendants."""
        family = self._descendants(sandbox_id)
        memory, disk = set[Element](), set[Element]()
        for each in self._manifests.values():
            if each.sandbox_id == sandbox_id:
                memory |= {e for e in each.memory or () if self._holders[e] <= family}
                disk |= {e for e in each.disk if self._holders[e] <= family}
        return memory, disk

    def _descendants(self, sandbox_id: str) -> set[str]:
        found, todo = set[str](), [sandbox_id]
        while todo:
            one = todo.pop()
            found.add(one)
            todo += self._children.get(one, ())
        return found

    def _steps(self, info: SandboxInfo) -> list[Relative]:
        """Its parent, and up to the next sandbox what lies between."""
        if info.origin not in (None, info.template_id):
            return [self._sandbox(info.origin)]
        build = self._builds.get(info.build_id)
        if build and SOURCE in build.doc:
            name = self._names.get(build.id) or build.snapshot_id or build.template_id
            return [Relative(Kind.SNAPSHOT, name), self._sandbox(build.doc[SOURCE])]
        if build or info.build_id:
            return [Relative(Kind.TEMPLATE, info.alias or info.template_id)]
        if made := self._manifests.get(info.template_id):
            return [Relative(Kind.SNAPSHOT, made.id), self._sandbox(made.sandbox_id)]
        kind = Kind.SNAPSHOT if info.origin else Kind.IMAGE
        return [Relative(kind, info.template_id)]

    def _sandbox(self, sandbox_id: str) -> Relative:
        known = self.sandboxes.get(sandbox_id)
        return Relative(Kind.SANDBOX, sandbox_id, known.state.shown if known else None)


def _names(templates: Iterable[TemplateRow]) -> Mapping[str, str]:
    """What each build that has a tag is asked for by."""
    return {
        build: f"{called(template)}:{tag}"
        for template in templates
        for tag, build in template.tags.items()
    }


async def family(node: Node) -> Family:
    """Of all that the node remembers and can read. Raises InfraError."""
    recorded = {i.id: i for i in map(readable, await node.records.sandboxes()) if i}
    live = {info.id: info for info in node.list()}
    return Family(
        (recorded | live).values(),
        await node.records.templates(),
        await node.records.builds(),
        node.ground.snapshots.all(),
    )


async def lineage(node: Node, sandbox_id: str) -> Lineage:
    """Raises NotFound, InfraError, ImageError for a layer that the store lost."""
    found = await family(node)
    if sandbox_id not in found.sandboxes:
        raise not_found(sandbox_id)
    return await _of(node, found, sandbox_id)


async def lineages(node: Node) -> Sequence[Lineage]:
    """Of all that have not ended, newest first. Raises as ``lineage``."""
    found = await family(node)
    lives = [info for info in found.sandboxes.values() if info.state is not State.ENDED]
    lives.sort(key=lambda info: info.started_at, reverse=True)
    return [await _of(node, found, info.id) for info in lives]


async def _of(node: Node, found: Family, sandbox_id: str) -> Lineage:
    info = found.sandboxes[sandbox_id]
    ancestors = found.ancestors(sandbox_id)
    memory, disk = found.own(sandbox_id)
    return Lineage(
        sandbox_id,
        info.state.shown,
        info.snapshot_id,
        ancestors[0],
        ancestors,
        found.children(sandbox_id),
        Own(await _bytes(node, memory), await _bytes(node, disk) + _live_disk(node, info)),
    )


async def _bytes(node: Node, elements: Iterable[Element]) -> int:
    return sum(await asyncio.gather(*(node.ground.snapshots.bytes_of(e) for e in elements)))


def _live_disk(node: Node, info: SandboxInfo) -> int:
    if info.slot is None:
        return 0
    try:
        return disk_of(node.ground, info).stat().st_blocks * 512
    except FileNotFoundError:  # it ends just now
        return 0
