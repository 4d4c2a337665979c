"""What sandboxes stand on here: slots, engine, images, disks, the data plane."""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.concurrency import Tasks
from agentenv.engine.contract import Engine, FlatSource
from agentenv.engine.engines import Engines
from agentenv.errors import InfraError
from agentenv.layer.catalog import ImageCatalog
from agentenv.layer.layers import Part
from agentenv.model import new_id
from agentenv.node.block_server import BlockServer
from agentenv.node.data_plane import DataPlane
from agentenv.node.edge import Resolver, Route
from agentenv.node.roots import Roots
from agentenv.node.slots import OPEN, SlotPool
from agentenv.node.warm import WarmPool
from agentenv.sandbox.ground import Place, Seat, Shape
from agentenv.sandbox.launch import make_folders, shape_of, start_waiting
from agentenv.sandbox.network import Policy
from agentenv.sandbox.record import SandboxInfo, to_row
from agentenv.snapshot.repository import Snapshots
from agentenv.store.records import Records

log = logging.getLogger(__name__)

DNS_PORT = 53
# What a sandbox reads in its first seconds is worth having at once on another node.
FIRST_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Folders:
    """``sandboxes`` and ``disks`` lie in the home, ``run`` in the runtime folder."""

    sandboxes: Path
    disks: Path
    run: Path


class NodeGround:
    """Implements ``Ground``."""

    def __init__(
        self,
        *,
        engines: Engines,
        records: Records,
        catalog: ImageCatalog,
        slots: SlotPool,
        data_plane: DataPlane,
        roots: Roots,
        block_server: BlockServer,
        snapshots: Snapshots,
        folders: Folders,
        name_servers: tuple[str, ...],
        warm_machines: int,
    ) -> None:
        self.engines, self._records, self._catalog = engines, records, catalog
        self._snapshots = snapshots
        self._slots, self._data_plane, self._roots = slots, data_plane, roots
        self._block_server = block_server
        self._tasks = Tasks()
        self._booted: dict[str, tuple[str, FlatSource]] = {}
        self._folders, self._name_servers = folders, name_servers
        self.warm = WarmPool(self._start_waiting, self._drop_waiting, warm_machines)

    def engine(self, name: str) -> Engine:
        return self.engines.named(name)

    @property
    def snapshots(self) -> Snapshots:
        return self._snapshots

    async def save(self, info: SandboxInfo) -> None:
        await self._records.put_sandbox(to_row(info))

    async def take_seat(self, info: SandboxInfo) -> Seat:
        if self._restores(info) and (seat := self.warm.take(shape_of(self, info))):
            try:
                if info.network != OPEN:
                    await self.fence(seat.place.index, info.network)
                return seat
            except BaseException:
                await asyncio.shield(self._drop_waiting(seat))
                raise
        return await self._seat(info.next_machine, info.network)

    def _restores(self, info: SandboxInfo) -> bool:
        """Whether it comes from memory that was saved, as far as this node knows: a machine that
        waits for that cannot boot."""
        found = self._snapshots.known(info.snapshot_id) if info.snapshot_id else None
        if found is None or found.memory is None:
            return False
        return not (info.from_disk and found.disk)

    async def _seat(self, machine: str, policy: Policy) -> Seat:
        place = self.place(await self._slots.acquire(policy))
        try:
            await make_folders(self, machine, place)
        except BaseException:
            await asyncio.shield(self._remove_seat(Seat(place, machine)))
            raise
        return Seat(place, machine)

    async def _start_waiting(self, shape: Shape) -> Seat:
        seat = await self._seat(new_id(), OPEN)
        try:
            waiting = await start_waiting(self, seat.machine, seat.place, shape)
            return replace(seat, waiting=waiting)
        except BaseException:
            await asyncio.shield(self._remove_seat(seat))
            raise

    async def _drop_waiting(self, seat: Seat) -> None:
        if seat.waiting is not None:
            await seat.waiting.kill()
        await self._remove_seat(seat)

    async def _remove_seat(self, seat: Seat) -> None:
        await self.release(seat.machine)
        for folder in (self.run_dir(seat.machine), self.files(seat.machine)):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await self._slots.release(seat.place.index)

    async def fence(self, index: int, policy: Policy) -> None:
        await self._slots.load_rules(index, policy)

    async def give_slot(self, index: int) -> None:
        await self._slots.release(index)

    def place(self, index: int) -> Place:
        uid = self._slots.uid(index)
        return Place(index, self._slots.attachment(index), uid, uid)

    async def close(self) -> None:
        await self._tasks.close()
        await self.warm.close()
        await self._snapshots.close()

    async def root(self, image_id: str, machine: str, *, whole: bool) -> FlatSource:
        return await self._roots.image(image_id, machine, whole=whole)

    async def blank(self, size_mib: int) -> Part:
        return await self._roots.blank(size_mib)

    async def disk_base(self, size_mib: int, machine: str) -> Path:
        return await self._roots.open_blank(size_mib, machine)

    def storage_fault(self, machine: str) -> str | None:
        fault = self._block_server.fault(machine)
        return fault.cause if fault else None

    async def release(self, machine: str) -> None:
        try:
            await self._learn(machine)
            await self._roots.release(machine)
        except InfraError as error:  # it is told who is left at the next start
            log.warning("%s still holds what it read: %s", machine, error.message)
        self._snapshots.release(machine)
        await self.engines.forget(machine)

    def has_booted(self, info: SandboxInfo, root: FlatSource) -> None:
        self._booted[info.machine] = (info.image_id, root)
        self._tasks.start(self._learn_later(info.machine), f"first reads of {info.image_id}")

    async def _learn_later(self, machine: str) -> None:
        await asyncio.sleep(FIRST_SECONDS)
        await self._learn(machine)

    async def _learn(self, machine: str) -> None:
        if booted := self._booted.pop(machine, None):
            await self._roots.learn_first_use(*booted)

    def files(self, machine: str) -> Path:
        return self._folders.sandboxes / machine

    def run_dir(self, machine: str) -> Path:
        return self._folders.run / machine

    async def publish(self, info: SandboxInfo, place: Place) -> None:
        await self._data_plane.put(*self._reached(info, place))

    def will_publish(self, info: SandboxInfo, place: Place) -> None:
        """Have ``publish_all`` tell of a sandbox that runs already."""
        self._data_plane.know(*self._reached(info, place))

    async def sleep(self, info: SandboxInfo, wakes: bool) -> None:
        await self._data_plane.asleep(_asleep(info, wakes))

    def will_sleep(self, info: SandboxInfo, wakes: bool) -> None:
        """Have ``publish_all`` tell of a sandbox that sleeps already."""
        self._data_plane.know(_asleep(info, wakes), None)

    async def publish_all(self) -> None:
        """Make the sandboxes published so far the whole truth of the data plane."""
        await self._data_plane.sync()

    async def withdraw(self, info: SandboxInfo) -> None:
        await self._data_plane.drop(info.id)

    def _reached(self, info: SandboxInfo, place: Place) -> tuple[Route, Resolver | None]:
        network = place.attachment
        address = network.address.partition("/")[0]
        route = Route(
            info.id,
            info.generation,
            str(network.netns),
            address,
            public=info.network.public,
            traffic_token=info.traffic_token,
            mask_host=info.network.mask_host,
            access_token=info.access_token,
        )
        if not info.network.resolves or not self._name_servers:
            return route, None
        listen = f"{network.gateway}:{DNS_PORT}"
        return route, Resolver(info.id, str(network.netns), listen, self._name_servers)

    async def reconcile(self, in_use: set[int], owned: set[str], *, serve: bool) -> None:
        """Remove what an earlier server left and no record owns: engines, folders, slots.
        ``owned`` are machines. Where nobody is served, no block server is asked to tidy."""
        await self.engines.sweep(owned)
        for parent in (self._folders.sandboxes, self._folders.run):
            for folder in parent.glob("*"):
                if folder.name not in owned:
                    await asyncio.to_thread(shutil.rmtree, folder)
        await self._slots.start(in_use)
        if not serve:
            return
        try:
            await self._roots.keep_only(owned)
            await self._catalog.sweep()
        except InfraError as error:  # what is cached can be used while the store is away
            log.warning("store and block server are not tidied now: %s", error.message)
        await self.engines.forget_all_but(owned)


def _asleep(info: SandboxInfo, wakes: bool) -> Route:
    return Route(
        info.id,
        info.generation,
        netns="",
        address="",
        public=info.network.public,
        traffic_token=info.traffic_token,
        access_token=info.access_token,
        asleep=True,
        wakes=wakes,
    )
