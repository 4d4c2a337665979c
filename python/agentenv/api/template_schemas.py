"""Bodies and answers of templates, builds and tags as E2B names their fields (E2B.md §1.2).

``stages``, ``provision`` and the step types ARG, EXEC, FILE and VOLUME are ours: what a Dockerfile
needs beside E2B's steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from agentenv.errors import UserError
from agentenv.sandbox.record import ENVD_VERSION
from agentenv.store.records import BuildRow, TemplateRow
from agentenv.template.bases import Login
from agentenv.template.builds import Progress
from agentenv.template.journal import LogEntry
from agentenv.template.named import engine_of_build, resources_of_build
from agentenv.template.recipe import Base, Kind, Origin, Recipe, Stage, Step

MAX_STEPS = 1000
Word = Annotated[str, StringConstraints(max_length=1 << 20)]
Files = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class TemplateBody(BaseModel):
    """TemplateBuildRequestV3; ``diskSizeMB`` and ``engine`` are ours."""

    name: str | None = Field(None, min_length=1, max_length=256)
    alias: str | None = Field(None, min_length=1, max_length=256)
    tags: list[str] | None = Field(None, max_length=100)
    cpuCount: int | None = Field(None, ge=1, le=64, strict=True)
    memoryMB: int | None = Field(None, ge=64, le=1 << 20, strict=True)
    diskSizeMB: int | None = Field(None, ge=64, le=4 << 20, strict=True)
    minFreeDiskMb: int | None = Field(None, ge=0, le=4 << 20, strict=True)
    engine: Literal["auto", "gvisor", "qemu"] | None = None

    def named(self) -> str:
        if not (name := self.name or self.alias):
            raise UserError("name is missing", code="invalid_name")
        return name

    def resources(self) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "vcpus": self.cpuCount,
            "memory_mib": self.memoryMB,
            "disk_mib": self.diskSizeMB,
            "free_mib": self.minFreeDiskMb,
            "engine": self.engine,
        }
        return {name: value for name, value in asked.items() if value is not None}


class StepBody(BaseModel):
    type: Kind
    args: list[Word] = Field(default_factory=list[Word], max_length=1000)
    filesHash: Files | None = None
    force: bool = False
    fromStage: str | None = Field(None, max_length=256)
    keepOwner: bool = False
    escape: Literal["\\", "`"] | None = None
    text: Annotated[str, StringConstraints(max_length=1 << 16)] = ""
    line: int | None = Field(None, ge=1)

    def step(self) -> Step:
        return Step(
            self.type,
            tuple(self.args),
            files=self.filesHash,
            stage=self.fromStage,
            keep_owner=self.keepOwner,
            force=self.force,
            escape=self.escape,
            text=self.text,
            line=self.line,
        )


class BaseBody(BaseModel):
    kind: Origin
    name: str = Field(min_length=1, max_length=512)


class StageBody(BaseModel):
    name: str = Field(max_length=256)
    base: BaseBody
    steps: list[StepBody] = Field(default_factory=list[StepBody], max_length=MAX_STEPS)


class RegistryBody(BaseModel):
    type: Literal["registry", "aws", "gcp"]
    username: str = ""
    password: str = ""

    def login(self) -> Login:
        """Raises UserError."""
        if self.type != "registry":
            raise UserError(
                f"fromImageRegistry of type {self.type} is not supported",
                fix="give a user name and a password, type registry",
                code="not_supported",
            )
        return Login(self.username, self.password)


class BuildBody(BaseModel):
    """TemplateBuildStartV2; with ``stages`` (ours) the last of them is the template."""

    fromImage: str | None = Field(None, min_length=1, max_length=512)
    fromTemplate: str | None = Field(None, min_length=1, max_length=512)
    fromImageRegistry: RegistryBody | None = None
    force: bool = False
    steps: list[StepBody] = Field(default_factory=list[StepBody], max_length=MAX_STEPS)
    startCmd: Word | None = None
    readyCmd: Word | None = None
    stages: list[StageBody] | None = Field(None, min_length=1, max_length=100)
    config: dict[str, Any] | None = None

    def recipe(self) -> Recipe:
        """Raises UserError."""
        return Recipe(
            self._stages(),
            start=self.startCmd or "",
            ready=self.readyCmd or "",
            force=self.force,
            config=self.config or {},
        )

    def _stages(self) -> tuple[Stage, ...]:
        if sum(map(bool, (self.fromImage, self.fromTemplate, self.stages))) != 1:
            raise UserError("give either fromImage or fromTemplate", code="invalid_step")
        if self.stages:
            return tuple(
                Stage(
                    stage.name,
                    Base(stage.base.kind, stage.base.name),
                    tuple(step.step() for step in stage.steps),
                    provision=False,
                )
                for stage in self.stages
            )
        base = (
            Base(Origin.IMAGE, self.fromImage)
            if self.fromImage
            else Base(Origin.TEMPLATE, self.fromTemplate or "")
        )
        return (Stage("", base, tuple(step.step() for step in self.steps)),)

    def login(self) -> Login | None:
        return self.fromImageRegistry.login() if self.fromImageRegistry else None


class TagsBody(BaseModel):
    target: str = Field(min_length=1, max_length=256)
    tags: list[str] = Field(min_length=1, max_length=100)


class UntagBody(BaseModel):
    name: str = Field(min_length=1, max_length=256)
    tags: list[str] = Field(min_length=1, max_length=100)


class PublicBody(BaseModel):
    public: bool


def aliases(row: TemplateRow) -> list[str]:
    return [name.rpartition("/")[2] for name in row.names]


def requested(row: TemplateRow, build: BuildRow) -> dict[str, Any]:
    return {
        "templateID": row.id,
        "buildID": build.id,
        "public": row.public,
        "names": list(row.names),
        "tags": build.doc["tags"],
        "aliases": aliases(row),
    }


def status(template_id: str, progress: Progress) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "templateID": template_id,
        "buildID": progress.row.id,
        "status": progress.row.status,
        "logs": [],
        "logEntries": [log_entry(entry) for entry in progress.entries],
    }
    if progress.reason:
        last = [log_entry(entry) for entry in progress.last]
        answer["reason"] = {**progress.reason, "logEntries": last}
    return answer


def log_entry(entry: LogEntry) -> dict[str, Any]:
    answer = {
        "timestamp": entry.time.isoformat(),
        "level": entry.level,
        "message": entry.message,
    }
    return answer | ({"step": entry.step} if entry.step else {})


def template(row: TemplateRow, builds: Sequence[BuildRow]) -> dict[str, Any]:
    """E2B's Template, and ``tags``, ``imageID`` and ``engine`` of ours."""
    shown = current(row, builds)
    return {
        "templateID": row.id,
        "buildID": shown.id if shown else "",
        **_size(shown),
        "public": row.public,
        "names": list(row.names),
        "aliases": aliases(row),
        "createdAt": row.created.isoformat(),
        "updatedAt": (shown.created if shown else row.created).isoformat(),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(builds),
        "envdVersion": ENVD_VERSION,
        "buildStatus": shown.status if shown else "waiting",
        "tags": row.tags,
        "imageID": shown.image_id if shown else None,
        "engine": engine_of_build(shown) if shown else None,
    }


def detailed(row: TemplateRow, builds: Sequence[BuildRow]) -> dict[str, Any]:
    return template(row, builds) | {"builds": [_build(each) for each in builds]}


def _build(row: BuildRow) -> dict[str, Any]:
    answer = {
        "buildID": row.id,
        "status": row.status,
        "createdAt": row.created.isoformat(),
        "updatedAt": row.created.isoformat(),
        **_size(row),
        "envdVersion": ENVD_VERSION,
    }
    return answer | ({"reason": row.doc["reason"]} if "reason" in row.doc else {})


def current(row: TemplateRow, builds: Sequence[BuildRow]) -> BuildRow | None:
    """What the template's name means; else the newest that has a tag, else the newest."""
    by_id = {build.id: build for build in builds}
    meant = [
        row.tags.get("default"),
        *(build.id for build in builds if build.id in row.tags.values()),
    ]
    return next((by_id[each] for each in meant if each in by_id), builds[0] if builds else None)


def _size(row: BuildRow | None) -> Mapping[str, int]:
    """Zeroes for what has the size that is asked for at create: an image."""
    found = resources_of_build(row) if row else None
    if found is None:
        return {"cpuCount": 0, "memoryMB": 0, "diskSizeMB": 0}
    return {
        "cpuCount": found.vcpus,
        "memoryMB": found.memory_mib,
        "diskSizeMB": found.disk_mib,
    }


def tags(row: TemplateRow, builds: Sequence[BuildRow]) -> list[dict[str, Any]]:
    made: Mapping[str, datetime] = {build.id: build.created for build in builds}
    return [
        {"tag": tag, "buildID": build_id, "createdAt": made.get(build_id, row.created).isoformat()}
        for tag, build_id in row.tags.items()
    ]
