"""One life of one sandbox: a record, a machine, and a lock that serialises what is done to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from agentenv.concurrency import Tasks
from agentenv.engine.contract import ControlChannel, ExitCause, ExitKind, Machine
from agentenv.errors import AgentEnvError, GuestError, InfraError
from agentenv.sandbox import adopt, launch, rollback, suspend
from agentenv.sandbox.deadline import Deadline
from agentenv.sandbox.ground import Ground
from agentenv.sandbox.network import Policy
from agentenv.sandbox.record import SandboxInfo, to_row
from agentenv.sandbox.state import Request, State, impossible, move
from agentenv.snapshot.manifest import Manifest

log = logging.getLogger(__name__)

PAUSE_AGAIN = timedelta(seconds=30)  # after one that failed at the deadline


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
        self._deadline = Deadline(tasks, f"expire {info.id}", self._expire)

    @property
    def id(self) -> str:
        return self.info.id

    async def create(self, boots: asyncio.Semaphore, boot_deadline: float) -> None:
        """Bring it up, from its snapshot if it has one. On failure everything is undone, the
        record too, and the error raised."""
        async with self._lock:
            try:
                await self._bring_up(boots, boot_deadline)
                await self._publish()
                await self._begin_running(self.info.end_at - self.info.started_at)
            except BaseException as error:
                await asyncio.shield(self._end(Request.DIED, _failed_creation(error)))
                raise

    async def _bring_up(self, boots: asyncio.Semaphore, boot_deadline: float) -> None:
        """Take a slot and start the machine in it; recorded is that there may be one."""
        phases = self.info.phases
        with launch.phase(phases, "slot"):
            seat = await self._ground.take_seat(self.info)
            self.info = self.info.with_(slot=seat.place.index, machine=seat.machine)
        if self.info.state is State.CREATING:
            with launch.phase(phases, "record"):
                await self._save()
        with launch.phase(phases, "queue"):
            await boots.acquire()
        try:
            running = await launch.launch(self._ground, self.info, seat, boot_deadline)
        finally:
            boots.release()
        self._machine, self._control = running.machine, running.control
        self.info = self.info.with_(restore=running.verdict)

    async def _publish(self) -> None:
        assert self.info.slot is not None
        with launch.phase(self.info.phases, "publish"):
            await self._ground.publish(self.info, self._ground.place(self.info.slot))

    async def _begin_running(self, lifetime: timedelta) -> None:
        now = utcnow()
        created = self.info.state is State.CREATING
        self.info = self.info.with_(
            state=move(self.id, self.info.state, Request.BOOTED),
            started_at=now if created else self.info.started_at,
            end_at=now + lifetime,
            lifetime=lifetime.total_seconds(),
        )
        await self._save()
        self._watch()

    async def pause(self, how: suspend.How) -> None:
        """Save it and end its machine; durable on this node when this returns.

        Raises Conflict if it does not run, GuestError, InfraError: then it runs as before.
        """
        async with self._lock:
            await self._pause(how)

    async def _pause(self, how: suspend.How) -> None:
        move(self.id, self.info.state, Request.PAUSE)
        await self._mend()
        running = self.info.with_(state=move(self.id, self.info.state, Request.PAUSE))
        self.info, before = running, self.info
        self._deadline.cancel()
        begun = utcnow()
        try:
            with launch.phase(self.info.phases, "pause.cut"):
                await self._ground.sleep(self.info, self.info.lifecycle.resume)
            async with suspend.paused(self._source(), how) as taken:
                self.info = running.with_(
                    state=move(self.id, running.state, Request.SAVED),
                    snapshot_id=taken.manifest.id,
                    disk_id=taken.manifest.id,
                    slot=None,
                    guest_silent=taken.silent,
                    end_at=begun,
                )
                with launch.phase(self.info.phases, "pause.record"):
                    await self._ground.snapshots.add(taken.manifest, to_row(self.info))
        except BaseException:
            await asyncio.shield(self._run_on(before))
            raise
        await self._let_go(running)

    async def _run_on(self, before: SandboxInfo) -> None:
        """It could not be paused: it runs as before, unless its machine died of it."""
        self.info = before.with_(phases=self.info.phases)
        with suppress(InfraError):
            await self._publish()
        self._deadline.set(self.info.end_at)

    async def _let_go(self, running: SandboxInfo) -> None:
        """The machine of one that is paused by now; what stays of it, the next start removes."""
        machine, control = self._machine, self._control
        self._machine = self._control = None
        try:
            with launch.phase(self.info.phases, "pause.end"):
                if control is not None:
                    await control.close()
                await launch.remove_machine(self._ground, running, machine)
        except Exception:
            log.exception("the machine of %s, paused by now, is not wholly removed", self.id)

    async def resume(
        self, boots: asyncio.Semaphore, boot_deadline: float, seconds: float | None, memory: bool
    ) -> bool:
        """Bring a paused one back; False if it runs already, and lives ``seconds`` more at least.

        Without ``seconds`` it has the lifetime it had before. Without ``memory`` it is booted
        from its disk. Raises Conflict, ImageError, GuestError, InfraError: then it is
        paused as before.
        """
        async with self._lock:
            if self.info.state is State.RUNNING:
                if seconds is not None:
                    await self._extend(seconds)
                return False
            before = self.info
            self.info = before.with_(
                state=move(self.id, before.state, Request.RESUME),
                generation=before.generation + 1,
                from_disk=not memory,
                phases={},
            )
            try:
                await self._bring_up(boots, boot_deadline)
                lifetime = before.lifetime if seconds is None else seconds
                await self._begin_running(timedelta(seconds=lifetime))
                await self._publish()
            except BaseException as error:
                await asyncio.shield(self._stay_paused(before))
                if isinstance(error, GuestError) and memory:
                    raise _advised(error, self.id) from error
                raise
            return True

    async def _stay_paused(self, before: SandboxInfo) -> None:
        failed, self.info = self.info, before
        self._deadline.cancel()
        await self._let_go(failed)
        if failed.state is State.RUNNING:
            await self._note()

    async def snapshot(self, how: suspend.How) -> Manifest:
        """A snapshot of it as it runs, which it goes on doing. Raises as ``pause``."""
        async with self._lock:
            self._must_run("a snapshot")
            await self._mend()
            return await suspend.snapshot(self._source(), how, self._sealed)

    async def _sealed(self, disk: Manifest) -> None:
        """From now on its disk lies over this one."""
        info = self.info.with_(disk_id=disk.id)
        await self._ground.snapshots.add(disk, to_row(info))
        self.info = info

    async def _mend(self) -> None:
        await suspend.mend(self._source(), self._sealed)

    async def rollback(
        self, turns: asyncio.Semaphore, boot_deadline: float, snapshot_id: str
    ) -> None:
        """Go back to a snapshot: a second machine is restored from it, then takes the first one's
        place. Id, tokens and deadline stay.

        Raises Conflict if it does not run, NotFound, ImageError, GuestError, InfraError: then it
        runs on as before.
        """
        async with self._lock, self._ground.snapshots.held(snapshot_id) as manifest:
            self._must_run("a rollback")
            first, machine, control = self.info, self._machine, self._control
            made = rollback.beside(self._ground, first, manifest, turns, boot_deadline)
            async with made as second:
                try:
                    self.info = second.info
                    self._machine, self._control = second.running.machine, second.running.control
                    await self._save()
                    await self._publish()
                except BaseException:
                    self.info, self._machine, self._control = first, machine, control
                    await asyncio.shield(self._stand_by(first))
                    raise
            self._watch()
            await rollback.remove(self._ground, first, machine, control)

    async def _stand_by(self, first: SandboxInfo) -> None:
        """It could not go back: its record and its route are those of the machine it has."""
        await self._note()
        await self._run_on(first)

    def _source(self) -> suspend.Source:
        assert self._machine is not None and self._control is not None
        return suspend.Source(self._ground, self.info, self._machine, self._control)

    async def adopt(self) -> bool:
        """After a restart of the server: find the machine again, or clean up. True if it lives."""
        async with self._lock:
            if self.info.state is State.PAUSED:
                self._ground.will_sleep(self.info, self.info.lifecycle.resume)
                return True
            found = await adopt.find(self._ground, self.info)
            if isinstance(found, ExitCause):
                await self._end(Request.DIED, found)
                return False
            assert self.info.slot is not None
            self._machine, self._control = found.machine, found.control
            try:
                await self._mend()
            except InfraError as error:  # it is tried again before the next snapshot
                log.warning("the disk of %s is not recorded yet: %s", self.id, error.message)
            if self.info.network_pending:
                await self._fence()
            self._ground.will_publish(self.info, self._ground.place(self.info.slot))
            self._watch()
            return True

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
        """Wait for what is being done with it; True if it lives then."""
        async with self._lock:
            return self.info.state in (State.RUNNING, State.PAUSED)

    async def set_deadline(self, seconds: float) -> SandboxInfo:
        """Move the end of its life to ``seconds`` from now; durable before this returns.

        Raises Conflict if it does not run.
        """
        async with self._lock:
            self._must_run("another deadline")
            await self._live_until(utcnow() + timedelta(seconds=seconds), seconds)
            return self.info

    def _must_run(self, asked: str) -> None:
        """Raises Conflict unless it runs."""
        if self.info.state is not State.RUNNING:
            raise impossible(self.id, self.info.state, asked)

    async def _extend(self, seconds: float) -> None:
        """As ``set_deadline``, but an earlier end is not applied."""
        end_at = utcnow() + timedelta(seconds=seconds)
        if end_at > self.info.end_at:
            await self._live_until(end_at, seconds)

    async def _live_until(self, end_at: datetime, lifetime: float) -> None:
        self.info = self.info.with_(end_at=end_at, lifetime=lifetime or self.info.lifetime)
        await self._save()
        self._deadline.set(self.info.end_at)

    async def set_network(self, change: Callable[[Policy], Policy]) -> None:
        """Replace its network policy while it runs; durable and in force when this returns.

        If the rules cannot be loaded the old ones are in force, and recorded. Raises Conflict,
        InfraError.
        """
        async with self._lock:
            self._must_run("another network policy")
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
        held = launch.objects(self._ground, self.info, self.info.slot)
        return {**held, **(self._machine.objects() if self._machine else {})}

    async def detach(self) -> None:
        """The server stops: let go of the machine without touching it."""
        self._deadline.cancel()
        if self._control is not None:
            await self._control.close()

    def _watch(self) -> None:
        assert self._machine is not None
        self._tasks.start(self._watch_death(self._machine), f"watch {self.id}")
        self._deadline.set(self.info.end_at)

    async def _expire(self) -> None:
        async with self._lock:
            if self.info.state is not State.RUNNING:
                return
            if self.info.end_at > utcnow():
                self._deadline.set(self.info.end_at)  # extended meanwhile
            elif self.info.lifecycle.pause:
                await self._pause_at_deadline()
            else:
                reason = "its lifetime was over"
                await self._end(Request.KILL, ExitCause(ExitKind.STOPPED, reason))

    async def _pause_at_deadline(self) -> None:
        how = suspend.How(memory=self.info.lifecycle.memory)
        try:
            await self._pause(how)
        except AgentEnvError as error:
            # Losing its work would be worse than letting it run on.
            log.error("sandbox %s cannot be paused at its deadline: %s", self.id, error.message)
            self.info = self.info.with_(end_at=utcnow() + PAUSE_AGAIN)
            self._deadline.set(self.info.end_at)

    async def _watch_death(self, machine: Machine) -> None:
        cause = await machine.wait()
        async with self._lock:
            if self._machine is machine and self.info.state is State.RUNNING:
                log.warning("sandbox %s died: %s", self.id, cause.reason)
                await self._end(Request.DIED, cause)

    async def _end(self, request: Request, cause: ExitCause) -> None:
        """Dismantle under the lock; ``cause`` is what the post-mortem says."""
        self._deadline.cancel()
        console = cause.console or (self._machine.console_tail() if self._machine else ())
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


def _advised(error: GuestError, sandbox_id: str) -> GuestError:
    """What was running in it may be what keeps it from going on."""
    fix = f"it is paused as before; without what ran in it: aenv resume {sandbox_id} --disk-only"
    return GuestError(error.what, why=error.why, fix=fix, code=error.code, **error.details)
