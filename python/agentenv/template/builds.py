"""The builds of a node: asked for, started, followed, cancelled; found again after a restart."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentenv.concurrency import KeyedLocks, Tasks
from agentenv.errors import AgentEnvError, Conflict, NotFound
from agentenv.model import new_id
from agentenv.sandbox.logs import Level
from agentenv.store.records import BuildRow, Records, TemplateRow
from agentenv.template import names
from agentenv.template.bases import Bases, Login
from agentenv.template.build import Build, Built, Size, StepFailed, Tools
from agentenv.template.ground import Sites, Workshop
from agentenv.template.journal import Journal, LogEntry
from agentenv.template.recipe import Recipe
from agentenv.template.uploads import Uploads

AT_ONCE = 2  # guests that build; more only make all of them late
DEADLINE = 3600.0  # seconds of one build
KEPT_STEPS = 200  # snapshots of steps; those used longest ago go first
KEPT_ENDS = 10  # of a template's builds that no tag means, how they ended
LAST_LINES = 20  # of the step that failed, told with the reason
WAITING, BUILDING, READY, FAILED = "waiting", "building", "ready", "error"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a build is; ``reason`` of one that failed: message, step, exit code."""

    row: BuildRow
    entries: Sequence[LogEntry]
    reason: Mapping[str, Any] | None
    last: Sequence[LogEntry] = ()


class Builds:
    """``folder`` holds a log for each build. ``start`` first, ``close`` last."""

    def __init__(
        self,
        records: Records,
        workshop: Workshop,
        sites: Sites,
        bases: Bases,
        uploads: Uploads,
        folder: Path,
    ) -> None:
        self._records, self._workshop, self._bases = records, workshop, bases
        self.uploads, self._folder = uploads, folder
        self._tools = Tools(records, workshop, sites, uploads.find)
        self._tasks = Tasks()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._journals: dict[str, Journal] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._turns = KeyedLocks()

    async def start(self) -> None:
        """What an earlier server was building is over."""
        for row in await self._records.builds(status=BUILDING):
            await self._fail(row, {"message": "the server was restarted"})
        await self._workshop.sweep()
        await asyncio.to_thread(self.uploads.sweep)

    async def close(self) -> None:
        """Cancel what runs; it is reported as cancelled by the server's end."""
        for task in list(self._running.values()):
            task.cancel("the server was stopped")
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._tasks.close()

    async def request(
        self, name: str, tags: Sequence[str], resources: Mapping[str, Any]
    ) -> tuple[TemplateRow, BuildRow]:
        """A build that waits for its recipe; the name is its template's from now on.

        ``resources``: what was asked for of ``Resources``, and ``engine``. Raises UserError.
        """
        asked = names.check(name)
        wanted = names.check_tags(asked.name, tags)
        if not wanted or asked.tag != names.DEFAULT_TAG:
            wanted = (asked.tag, *wanted)
        now = datetime.now(UTC)
        doc = {"tags": [*dict.fromkeys(wanted)], "asked": dict(resources)}
        row = BuildRow(str(uuid.uuid4()), new_id(), None, now, doc, status=WAITING)
        row = await self._records.add_build(row, asked.name)
        template = await self._records.template(row.template_id)
        if template is None:
            raise Conflict(f"template {asked.name} was just removed", code="template_removed")
        return template, row

    async def begin(
        self, template_id: str, build_id: str, plan: Recipe, login: Login | None = None
    ) -> None:
        """Start a build that waits. Raises NotFound, Conflict, UserError."""
        row = await self.find(template_id, build_id)
        if row.status != WAITING:
            raise Conflict(
                f"build {build_id} is {row.status}, it was started before",
                fix="ask for a new build",
                code="build_started",
                state=row.status,
            )
        row = replace(row, status=BUILDING)
        await self._records.put_build(row)
        self._journals[row.id] = Journal(self._log(row.id))
        task = self._tasks.start(self._work(row, plan, login), f"build {row.id}")
        self._running[row.id] = task

    async def find(self, template_id: str, build_id: str) -> BuildRow:
        """Raises NotFound (``build_not_found``)."""
        row = await self._records.build(build_id)
        if row is None or row.template_id != template_id:
            raise NotFound(f"build '{build_id}' not found", code="build_not_found")
        return row

    async def progress(
        self,
        template_id: str,
        build_id: str,
        offset: int = 0,
        *,
        limit: int = 100,
        level: Level | None = None,
    ) -> Progress:
        row = await self.find(template_id, build_id)
        journal = self._journals.get(row.id)
        if journal is None:
            journal = await asyncio.to_thread(Journal.read, self._log(row.id))
        reason = row.doc.get("reason")
        last = journal.last(reason["step"], LAST_LINES) if reason and reason.get("step") else ()
        return Progress(row, journal.page(offset, limit=limit, level=level), reason, last)

    async def cancel(self, template_id: str, build_id: str) -> None:
        """Stop it; nothing of it is left when this returns. One that has ended: Conflict."""
        row = await self.find(template_id, build_id)
        task = self._running.get(row.id)
        if task is None:
            if row.status != WAITING:
                raise Conflict(f"build {build_id} is {row.status}", state=row.status)
            await self._fail(row, {"message": "the build was cancelled"})
            return
        task.cancel("the build was cancelled")
        await asyncio.wait([task])

    async def forget(self, template: TemplateRow) -> None:
        """Stop the builds of a template that goes, and drop what only they need."""
        rows = await self._records.builds(template.id)
        for row in rows:
            if task := self._running.get(row.id):
                task.cancel("the template was removed")
                await asyncio.wait([task])
        await self._records.drop_template(template.id)
        for row in rows:
            await asyncio.to_thread(self._log(row.id).unlink, True)
        self._workshop.tidy()

    # One build

    async def _work(self, row: BuildRow, plan: Recipe, login: Login | None) -> None:
        journal = self._journals[row.id]
        try:
            async with self._turns.hold(row.template_id), self._room, asyncio.timeout(DEADLINE):
                size = await self._bases.size(plan, row.doc["asked"])
                found = self._bases.finder(login, journal)
                build = Build(self._tools, plan, size, found, journal)
                await self._finish(row, await build.run(), size, plan)
        except asyncio.CancelledError as error:
            why = str(error.args[0]) if error.args else "the build was cancelled"
            await asyncio.shield(self._stopped(row, why, journal))
        except StepFailed as error:
            await self._fail(row, _reason(error), journal)
        except AgentEnvError as error:
            await self._fail(row, {"message": error.message}, journal)
        except TimeoutError:
            await self._fail(row, {"message": f"it took longer than {DEADLINE:g} s"}, journal)
        except Exception:
            await self._fail(row, {"message": "internal error; see the server's log"}, journal)
            raise
        finally:
            del self._running[row.id]
            self._journals.pop(row.id).close()
        await self.tidy(row.template_id)

    async def _stopped(self, row: BuildRow, why: str, journal: Journal) -> None:
        """It may have been ready just before."""
        found = await self._records.build(row.id)
        if found is not None and found.status == BUILDING:
            await self._fail(row, {"message": why}, journal)

    async def _finish(self, row: BuildRow, built: Built, size: Size, plan: Recipe) -> None:
        """Make it what its tags mean; what they meant before goes, unless another tag means it."""
        doc = {
            "guest": asdict(built.state.guest()),
            "resources": asdict(size.resources),
            "engine": size.engine,
            "config": {**built.config, **plan.config},
        }
        ready = replace(row, doc=doc, snapshot_id=built.snapshot_id, status=READY)
        self._journals[row.id].add("info", "the build is ready")
        await self._records.put_build(ready, row.doc["tags"])

    async def _fail(
        self, row: BuildRow, reason: Mapping[str, Any], journal: Journal | None = None
    ) -> None:
        if journal is not None:
            journal.add("error", str(reason["message"]), reason.get("step"))
        failed = replace(row, status=FAILED, doc={**row.doc, "reason": dict(reason)})
        await self._records.put_build(failed)

    # What is not needed any more

    async def tidy(self, template_id: str) -> None:
        """Drop what no tag means of builds, all but the news of the latest, and steps that were not
        used for long."""
        rows = await self._records.builds(template_id)
        # Asked after the builds: one that is ready by now is meant by its tags by now.
        template = await self._records.template(template_id)
        meant = set(template.tags.values()) if template else set[str]()
        over = [row for row in rows if row.status in (READY, FAILED) and row.id not in meant]
        for row in over[:KEPT_ENDS]:
            if row.snapshot_id or row.image_id:  # whoever waits for it is still to be told
                await self._records.put_build(replace(row, image_id=None, snapshot_id=None))
        for row in over[KEPT_ENDS:]:
            await self._records.drop_build(row.id)
            await asyncio.to_thread(self._log(row.id).unlink, True)
        await self._records.steps.trim(KEPT_STEPS)
        self._workshop.tidy()

    def _log(self, build_id: str) -> Path:
        return self._folder / f"{build_id}.log"


def _reason(error: StepFailed) -> dict[str, Any]:
    reason: dict[str, Any] = {"message": error.cause.message, "step": error.step}
    if error.exit_code is not None:
        reason["exitCode"] = error.exit_code
    return reason
