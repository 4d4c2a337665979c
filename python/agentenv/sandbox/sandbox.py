"""One life of one sandbox: a record, a machine, and a lock that serialises what is done to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from agentenv.concurrency import Tasks
from agentenv.engine.contract import ControlChannel, ExitCause, ExitKind, Machine
from agentenv.errors import GuestError, InfraError
from agentenv.sandbox import launch
from agentenv.sandbox.ground import Ground
from agentenv.sandbox.network import Policy
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import Request, State, move

log = logging.getLogger(__name__)


def utcnow() -> datetime:
    return datetime.now(UTC)


class Sandbox:
    """All changes go through ``_lock``; ``on_end`` is called once when it has ended."""

    def __init__(
        self,
        ground: Ground,
        info: SandboxInfo,
        tasks: Tasks,
        on_end: Callable[[Sandbox], None],
    ) -> None:
        self.info = info
        self._ground, self._tasks, self._on_end = ground, tasks, on_end
        self._lock = asyncio.Lock()
        self._machine: Machine | None = None
        self._control: ControlChannel | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self.info.id

    async def create(self, boots: asyncio.Semaphore, boot_deadline: float) -> None:
        """Bring it up. On failure everything is undone, the record too, and the error raised."""
        async with self._lock:
            try:
                await self._save()
                with launch.phase(self.info.phases, "slot"):
                    place = await self._ground.take_slot(self.info.network)
                    self.info = self.info.with_(slot=place.index)
                    await self._save()
                with launch.phase(self.info.phases, "queue"):
                    await boots.acquire()
                try:
                    self._machine, self._control = await launch.launch(
                        self._ground, self.info, place, boot_deadline
                    )
                finally:
                    boots.release()
                with launch.phase(self.info.phases, "publish"):
                    await self._ground.publish(self.info, place)
                await self._begin_running()
            except BaseException as error:
                await asyncio.shield(self._end(Request.DIED, _failed_creation(error)))
                raise

    async def _begin_running(self) -> None:
        now = utcnow()
        lifetime = self.info.end_at - self.info.started_at
        self.info = self.info.with_(
            state=move(self.id, self.info.state, Request.BOOTED),
            started_at=now,
            end_at=now + lifetime,
        )
        await self._save()
        self._watch()

    async def adopt(self) -> bool:
        """After a restart of the server: find the machine again, or clean up. True if it runs."""
        async with self._lock:
            if self.info.state is State.RUNNING and self.info.slot is not None:
                place = self._ground.place(self.info.slot)
                spec = launch.machine_spec(self._ground, self.info, place)
                self._machine = await self._ground.engine.adopt(spec)
                if self._machine is not None:
                    try:
                        self._control = await self._machine.control()
                    except (InfraError, GuestError, TimeoutError):
                        await self._end(Request.DIED, await self._machine.kill())
                        return False
                    if self.info.network_pending:
                        await self._fence()
                    self._ground.will_publish(self.info, place)
                    self._watch()
                    return True
            half_made = self.info.state is State.CREATING
            reason = (
                "the server was restarted while it was being made"
                if half_made
                else "the machine ended while no server watched"
            )
            await self._end(Request.DIED, ExitCause(ExitKind.UNKNOWN, reason))
            return False

    async def proceed(self) -> None:
        """Its storage answers again: if that stopped the guest, let it go on. Raises InfraError."""
        async with self._lock:
            if self._machine is not None and await self._machine.proceed():
                log.info("sandbox %s goes on: its storage answers again", self.id)

    async def kill(self, reason: str = "killed on request") -> bool:
        """End it now. False if it had ended already."""
        async with self._lock:
            if self.info.state is State.ENDED:
                return False
            await self._end(Request.KILL, ExitCause(ExitKind.STOPPED, reason))
            return True

    async def settled(self) -> bool:
        """Wait for what is being done with it; True if it runs then."""
        async with self._lock:
            return self.info.state is State.RUNNING

    async def set_deadline(self, seconds: float, *, only_extend: bool = False) -> SandboxInfo:
        """Move the end of its life to ``seconds`` from now; durable before this returns.

        With ``only_extend`` an earlier end is not applied. Raises Conflict if it does not run.
        """
        async with self._lock:
            if self.info.state is not State.RUNNING:
                move(self.id, self.info.state, Request.BOOTED)
            end_at = utcnow() + timedelta(seconds=seconds)
            if not only_extend or end_at > self.info.end_at:
                self.info = self.info.with_(end_at=end_at)
                await self._save()
                self._set_timer()
            return self.info

    async def set_network(self, change: Callable[[Policy], Policy]) -> None:
        """Replace its network policy while it runs; durable and in force when this returns.

        If the rules cannot be loaded the old ones are in force, and recorded. Raises Conflict,
        InfraError.
        """
        async with self._lock:
            if self.info.state is not State.RUNNING:
                move(self.id, self.info.state, Request.BOOTED)
            before = self.info.network
            try:
                await self._enforce(change(before))
            except InfraError:
                await self._enforce(before)
                raise

    async def _enforce(self, policy: Policy) -> None:
        self.info = self.info.with_(network=policy, network_pending=True)
        await self._save()
        await self._fence()
        assert self.info.slot is not None
        await self._ground.publish(self.info, self._ground.place(self.info.slot))

    async def _fence(self) -> None:
        assert self.info.slot is not None
        await self._ground.fence(self.info.slot, self.info.network)
        self.info = self.info.with_(network_pending=False)
        await self._save()

    @property
    def pid(self) -> int | None:
        """The engine's process; None while there is none."""
        return self._machine.pid if self._machine else None

    async def stats(self, timeout: float = 10.0) -> dict[str, float]:
        """The guest's own figures. Raises GuestError if it does not answer."""
        if self._control is None:
            raise GuestError(f"sandbox {self.id} does not run", code="guest_unresponsive")
        return await self._control.call("stats", timeout=timeout)

    def console(self, lines: int) -> tuple[str, ...]:
        """The last console lines; after its end those of the post-mortem."""
        if self._machine is not None:
            return self._machine.console_tail(lines)
        return self.info.cause.console[-lines:] if self.info.cause else ()

    def objects(self) -> dict[str, object]:
        """Every host object that is held for it."""
        if self.info.slot is None or self.info.state is State.ENDED:
            return {}
        place = self._ground.place(self.info.slot)
        return {
            "slot": place.index,
            "netns": str(place.attachment.netns),
            "tap": place.attachment.tap,
            "uid": place.uid,
            "files": str(self._ground.files(self.id)),
            "run_dir": str(self._ground.run_dir(self.id)),
            **(self._machine.objects() if self._machine else {}),
        }

    async def detach(self) -> None:
        """The server stops: let go of the machine without touching it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._control is not None:
            await self._control.close()

    def _watch(self) -> None:
        assert self._machine is not None
        self._tasks.start(self._watch_death(self._machine), f"watch {self.id}")
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = (self.info.end_at - utcnow()).total_seconds()
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, delay), lambda: self._tasks.start(self._expire(), f"expire {self.id}")
        )

    async def _expire(self) -> None:
        async with self._lock:
            if self.info.state is not State.RUNNING:
                return
            if self.info.end_at > utcnow():
                self._set_timer()  # extended meanwhile
                return
            await self._end(Request.KILL, ExitCause(ExitKind.STOPPED, "its lifetime was over"))

    async def _watch_death(self, machine: Machine) -> None:
        cause = await machine.wait()
        async with self._lock:
            if self.info.state is State.RUNNING:
                log.warning("sandbox %s died: %s", self.id, cause.reason)
                await self._end(Request.DIED, cause)

    async def _end(self, request: Request, cause: ExitCause) -> None:
        """Dismantle under the lock; ``cause`` is what the post-mortem says."""
        if self._timer is not None:
            self._timer.cancel()
        console = self._machine.console_tail() if self._machine else cause.console
        self.info = self.info.with_(
            state=move(self.id, self.info.state, request),
            cause=ExitCause(cause.kind, cause.reason, cause.status, console),
        )
        await self._note()
        if self._control is not None:
            await self._control.close()
        await launch.dismantle(self._ground, self.info, self._machine)
        self._machine = self._control = None
        self.info = self.info.with_(
            state=move(self.id, self.info.state, Request.GONE),
            slot=None,
            end_at=utcnow(),
            access_token=None,  # of no use any more, and the post-mortem is kept
            traffic_token=None,
        )
        await self._note()
        self._on_end(self)

    async def _save(self) -> None:
        await self._ground.save(self.info)

    async def _note(self) -> None:
        """Save, if the store takes it: a full disk must not keep a sandbox from being dismantled.

        A record left behind is found by the next server, which ends it.
        """
        try:
            await self._save()
        except InfraError as error:
            log.error("the end of sandbox %s is not recorded: %s", self.id, error.message)


def _failed_creation(error: BaseException) -> ExitCause:
    kind = ExitKind.FAILED if isinstance(error, InfraError) else ExitKind.UNKNOWN
    return ExitCause(kind, f"its creation failed: {error or type(error).__name__}")
