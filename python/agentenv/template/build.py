"""Builds one recipe: what was kept of it before, the steps that remain, each kept as a snapshot.

A stage's guest is begun when a step first needs it, from the last snapshot that was kept; a stage
of which all is known needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv.concurrency import Tasks
from agentenv.errors import AgentEnvError, UserError
from agentenv.model import Resources
from agentenv.sandbox.logs import Level
from agentenv.store.records import Records
from agentenv.template import fold, recipe
from agentenv.template.fold import Action, State
from agentenv.template.ground import Site, Sites, Workshop
from agentenv.template.journal import Journal
from agentenv.template.recipe import Recipe, Stage
from agentenv.template.work import CommandFailed, Report, Work, follow

BASE, FINALIZE = "base", "finalize"
READY_INTERVAL = 2.0  # seconds between two tries of the ready command (E2B.md §1.2)
READY_DEADLINE = 600.0
DEFAULT_READY = "sleep 20"  # of a start command without one
LEVEL_OF: Mapping[str, Level] = {"stdout": "info", "stderr": "warn"}


@dataclass(frozen=True, slots=True)
class Foundation:
    """What a stage begins with: an image to boot, or a snapshot to go on from.

    ``identity`` names its content; ``config`` is what is recorded of it.
    """

    image_id: str | None
    snapshot_id: str | None
    state: State
    identity: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


Founded = Callable[[recipe.Base, bool], Awaitable[Foundation]]
"""Finds a base, pulling an image that is not here; with True it is to be provisioned."""


@dataclass(frozen=True, slots=True)
class Size:
    """What the guests of a build are made with."""

    resources: Resources
    engine: str


@dataclass(frozen=True, slots=True)
class Tools:
    records: Records
    workshop: Workshop
    sites: Sites
    uploaded: Callable[[str], Path | None]


@dataclass(frozen=True, slots=True)
class Built:
    """A finished stage: its last snapshot, and what begins with it."""

    snapshot_id: str
    state: State
    key: str
    config: Mapping[str, Any]


class StepFailed(Exception):
    """``step`` as E2B names it: ``base``, ``finalize`` or a number from 1."""

    def __init__(self, step: str, cause: AgentEnvError) -> None:
        super().__init__(cause.message)
        self.step, self.cause = step, cause

    @property
    def exit_code(self) -> int | None:
        return self.cause.exit_code if isinstance(self.cause, CommandFailed) else None


@contextlib.contextmanager
def _step(name: str) -> Generator[None]:
    try:
        yield
    except AgentEnvError as error:
        raise StepFailed(name, error) from error


class Bench:
    """The guest a stage is built in, and what it is begun from."""

    def __init__(self, tools: Tools, size: Size, origin: Foundation) -> None:
        self._tools, self._size, self._origin = tools, size, origin
        self._held = AsyncExitStack()
        self._sandbox_id: str | None = None
        self._site: Site | None = None
        self.snapshot_id = origin.snapshot_id

    async def site(self) -> Site:
        """The inside of the guest, which runs from the first call on."""
        if self._site is None:
            workshop = self._tools.workshop
            image_id = None if self.snapshot_id else self._origin.image_id
            # Steps name their user and folder; those of the state may still have to be made.
            guest = replace(self._origin.state.guest(), user="root", workdir="/")
            info = await workshop.begin(
                image_id, self.snapshot_id, self._size.resources, guest, self._size.engine
            )
            self._sandbox_id = info.id
            self._held.push_async_callback(workshop.end, info.id)
            self._site = await self._held.enter_async_context(self._tools.sites(info))
        return self._site

    async def keep(self, key: str) -> None:
        """Remember how the guest is now under ``key``."""
        await self.site()
        assert self._sandbox_id is not None
        async with self._tools.workshop.capture(self._sandbox_id) as snapshot_id:
            await self._tools.records.steps.keep(key, snapshot_id)
            self.snapshot_id = snapshot_id

    async def close(self) -> None:
        await self._held.aclose()


class Donors:
    """Guests of finished stages that a stage copies from, each begun when it is first asked for."""

    def __init__(self, tools: Tools, size: Size, built: Mapping[str, Built]) -> None:
        self._tools, self._size, self._built = tools, size, built
        self._benches: dict[str, Bench] = {}

    async def site(self, stage: str) -> Site:
        if stage not in self._benches:
            done = self._built[stage]
            origin = Foundation(None, done.snapshot_id, done.state, done.key)
            self._benches[stage] = Bench(self._tools, self._size, origin)
        return await self._benches[stage].site()

    async def close(self) -> None:
        for bench in self._benches.values():
            await bench.close()


class Build:
    """One run of a recipe."""

    def __init__(
        self, tools: Tools, plan: Recipe, size: Size, found: Founded, journal: Journal
    ) -> None:
        self._tools, self._recipe, self._size = tools, plan, size
        self._found, self._journal = found, journal
        self._built: dict[str, Built] = {}

    async def run(self) -> Built:
        """The finished template. Raises StepFailed; no guest is left, whatever happens."""
        with _step(BASE):
            recipe.check(self._recipe)
        for stage in self._recipe.stages:
            self._built[stage.name] = await self._stage(stage)
        return self._built[self._recipe.final.name]

    async def _stage(self, stage: Stage) -> Built:
        is_final = stage is self._recipe.final
        with _step(self._label(stage, BASE)):
            origin = await self._foundation(stage)
        states, actions = self._fold(stage, origin.state)
        size, guest = self._size, origin.state.guest()
        first = recipe.base_key(
            origin.identity, guest, size.resources, size.engine, provision=stage.provision
        )
        copied = {name: built.key for name, built in self._built.items()}
        keys = [first, *recipe.step_keys(first, stage.steps, copied)]
        marks = fold.captured(actions)
        async with self._bench(origin) as (bench, donors):
            done = await self._known(stage, keys, bench)
            if done < 0:
                with _step(self._label(stage, BASE)):
                    await self._prepare(stage, bench, first, donors)
                done = 0
            for at in range(done, len(stage.steps)):
                await self._do(stage, at, actions[at], bench, donors)
                if marks[at]:
                    with _step(self._label(stage, str(at + 1))):
                        await bench.keep(keys[at + 1])
            key, state = keys[-1], states[-1]
            if is_final:
                key = await self._finish(stage, bench, state, key)
            assert bench.snapshot_id is not None
            return Built(bench.snapshot_id, state, key, origin.config)

    @asynccontextmanager
    async def _bench(self, origin: Foundation) -> AsyncGenerator[tuple[Bench, Donors]]:
        bench = Bench(self._tools, self._size, origin)
        donors = Donors(self._tools, self._size, self._built)
        try:
            yield bench, donors
        finally:
            await asyncio.shield(asyncio.gather(donors.close(), bench.close()))

    async def _foundation(self, stage: Stage) -> Foundation:
        if stage.base.kind is recipe.Origin.STAGE:
            built = self._built[stage.base.name]
            return Foundation(None, built.snapshot_id, built.state, built.key, built.config)
        self._say("info", f"FROM {stage.base.name}", self._label(stage, BASE))
        return await self._found(stage.base, stage.provision)

    def _fold(self, stage: Stage, state: State) -> tuple[list[State], list[Action | None]]:
        """The state after each step (the first is before any), and what each asks."""
        states, actions = [state], list[Action | None]()
        for number, step in enumerate(stage.steps, 1):
            with _step(self._label(stage, str(number))):
                state, action = fold.fold(state, step)
            states.append(state)
            actions.append(action)
        return states, actions

    async def _known(self, stage: Stage, keys: list[str], bench: Bench) -> int:
        """How many steps were kept before, -1 if not even the base was; the bench begins there."""
        if self._recipe.force:
            return -1
        forced = [at for at, step in enumerate(stage.steps) if step.force]
        newest = min(forced, default=len(stage.steps))
        for done in range(newest, -1, -1):
            kept = await self._tools.records.steps.find(keys[done])
            if kept is None:
                continue
            if not await self._tools.workshop.usable(kept, self._size.engine):
                await self._tools.records.steps.drop(kept)
                continue
            bench.snapshot_id = kept
            for at in range(done):
                self._say(
                    "info", f"CACHED {self._title(stage, at)}", self._label(stage, str(at + 1))
                )
            return done
        return -1

    async def _prepare(self, stage: Stage, bench: Bench, key: str, donors: Donors) -> None:
        """A base that was built is ready; an image is booted, and gets E2B's user."""
        if bench.snapshot_id is not None:
            return
        site = await bench.site()
        if stage.provision:
            work = Work(site, self._tools.uploaded, donors.site)
            await work.add_user(fold.DEFAULT_USER, sudo=True)
        await bench.keep(key)

    async def _do(
        self, stage: Stage, at: int, action: Action | None, bench: Bench, donors: Donors
    ) -> None:
        label = self._label(stage, str(at + 1))
        self._say("info", self._title(stage, at), label)
        if action is None:
            return

        def report(stream: str, line: str) -> None:
            self._say(LEVEL_OF[stream], line, label)

        with _step(label):
            work = Work(await bench.site(), self._tools.uploaded, donors.site)
            await work.do(action, report)

    async def _finish(self, stage: Stage, bench: Bench, state: State, key: str) -> str:
        """Start what shall run in every sandbox, and wait until it says it is ready."""
        start, ready = self._recipe.start, self._recipe.ready
        if not start and not ready:
            return key
        key = recipe.final_key(key, start, ready)
        with _step(FINALIZE):
            forced = self._recipe.force or any(step.force for step in stage.steps)
            kept = None if forced else await self._tools.records.steps.find(key)
            if kept and await self._tools.workshop.usable(kept, self._size.engine):
                bench.snapshot_id = kept
                self._say("info", f"CACHED start {start}", FINALIZE)
                return key
            await self._start(await bench.site(), state)
            await bench.keep(key)
        return key

    async def _start(self, site: Site, state: State) -> None:
        def report(stream: str, line: str) -> None:
            self._say(LEVEL_OF[stream], line, FINALIZE)

        def command(text: str) -> fold.Run:
            return fold.Run((*fold.SHELL, text), state.env, state.workdir, state.user, text)

        start = self._recipe.start
        ready = self._recipe.ready or DEFAULT_READY
        tasks = Tasks()
        try:
            waited = [tasks.start(_until(site, command(ready), report), "ready", awaited=True)]
            self._say("info", f"ready when: {ready}", FINALIZE)
            if start:
                self._say("info", f"start: {start}", FINALIZE)
                waited.append(
                    tasks.start(_started(site, command(start), report), "start", awaited=True)
                )
            async with asyncio.timeout(READY_DEADLINE):
                while not waited[0].done():
                    done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                    waited = [task for task in waited if task not in done or task is waited[0]]
        except TimeoutError as error:
            raise UserError(
                f"the ready command '{ready}' did not succeed within {READY_DEADLINE:g} s",
                code="not_ready",
            ) from error
        finally:
            await tasks.close()

    def _title(self, stage: Stage, at: int) -> str:
        name = "" if stage is self._recipe.final else f"{stage.name} "
        return f"[{name}{at + 1}/{len(stage.steps)}] {stage.steps[at].shown()}"

    def _label(self, stage: Stage, step: str) -> str:
        return step if stage is self._recipe.final else f"{stage.name}:{step}"

    def _say(self, level: Level, message: str, step: str) -> None:
        self._journal.add(level, message, step)


async def _until(site: Site, ready: fold.Run, report: Report) -> None:
    """The ready command, again and again until it succeeds."""
    while (await follow(site, ready, report)).code != 0:
        await asyncio.sleep(READY_INTERVAL)


async def _started(site: Site, start: fold.Run, report: Report) -> None:
    """Follow what was started. Raises CommandFailed if it ends, and not well."""
    end = await follow(site, start, report)
    if end.code != 0:
        raise CommandFailed(start.command, end.status, end.code)
