"""What a template is built by: bases, steps, and what each step asks of the guest. Pure.

A recipe is stages in order, the last one the template; most have one. A step is folded over the
state (environment, user, folder) that those before it left, which gives what is to be done and
the state after it. The key of a step hashes the key before it and the step, so two recipes that
begin alike share what was kept after their common steps.

Kinds COPY, RUN, ENV, WORKDIR and USER are E2B's (E2B.md §1.2); the others are what Dockerfiles
need beside them.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import UserError
from agentenv.model import Guest, Resources

VERSION = 1  # of what steps mean: another one shares nothing with snapshots of this one
# Given without being declared, and no reason to do a step again (Docker's rule).
PREDEFINED = frozenset(
    name
    for proxy in ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
    for name in (proxy, proxy.upper())
)


class Kind(enum.StrEnum):
    """What a step does; the arguments of each are described at ``Step``."""

    COPY = "COPY"
    RUN = "RUN"
    ENV = "ENV"
    WORKDIR = "WORKDIR"
    USER = "USER"
    ARG = "ARG"
    EXEC = "EXEC"
    FILE = "FILE"
    VOLUME = "VOLUME"


class Origin(enum.StrEnum):
    """What a stage begins with; ``NAME`` is a template if there is one of that name, else an image,
    as where a sandbox is created."""

    NAME = "name"
    IMAGE = "image"
    TEMPLATE = "template"
    STAGE = "stage"


@dataclass(frozen=True, slots=True)
class Base:
    kind: Origin
    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction. ``args`` by kind:

    COPY source, destination[, owner[, octal mode]] · RUN command[, user] · ENV name, value, … ·
    WORKDIR folder · USER name · ARG name, value, … · EXEC program, argument, … · FILE name,
    content, destination, owner, mode, ``expand`` or empty · VOLUME folder, …

    ``files``: hash of the uploaded archive that COPY takes from; or ``stage``: the stage it takes
    from. ``keep_owner``: files keep the archive's owners where none is given. ``force``: done even
    if it is known. ``escape``: the words are raw ones of a Dockerfile with that escape character.
    ``text`` and ``line``: how a Dockerfile has it, and where.
    """

    kind: Kind
    args: tuple[str, ...]
    files: str | None = None
    stage: str | None = None
    keep_owner: bool = False
    force: bool = False
    escape: str | None = None
    text: str = ""
    line: int | None = None

    def shown(self) -> str:
        """For people: one line."""
        args = self.args[:1] if self.kind in (Kind.RUN, Kind.FILE) else self.args
        whole = self.text or f"{self.kind} {' '.join(filter(None, args))}"
        first, *rest = whole.strip().splitlines()
        text = first + (" …" if rest else "")
        return text if len(text) <= 120 else text[:117] + "..."


@dataclass(frozen=True, slots=True)
class Stage:
    """``provision``: the base gets the user that E2B's templates have, and begins as that one."""

    name: str
    base: Base
    steps: tuple[Step, ...]
    provision: bool = True


@dataclass(frozen=True, slots=True)
class Recipe:
    """``config``: what the template says of itself beside its state (command, labels, ports)."""

    stages: tuple[Stage, ...]
    start: str = ""
    ready: str = ""
    force: bool = False
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def final(self) -> Stage:
        return self.stages[-1]


def check(recipe: Recipe) -> None:
    """Raises UserError (``invalid_step``) before anything is done."""
    known: set[str] = set()
    for stage in recipe.stages:
        if stage.name in known:
            raise UserError(f"two stages are called {stage.name!r}", code="invalid_step")
        if stage.base.kind is Origin.STAGE and stage.base.name not in known:
            raise UserError(
                f"stage {stage.name!r} begins with {stage.base.name!r}",
                why="which is no stage before it",
                code="invalid_step",
            )
        for number, step in enumerate(stage.steps, 1):
            _check_step(step, number, known)
        known.add(stage.name)


# The least and the most arguments; ENV and ARG come in pairs.
_COUNTS: dict[Kind, tuple[int, float]] = {
    Kind.COPY: (2, 4), Kind.RUN: (1, 2), Kind.ENV: (2, float("inf")), Kind.WORKDIR: (1, 1),
    Kind.USER: (1, 2), Kind.ARG: (2, float("inf")), Kind.EXEC: (1, float("inf")),
    Kind.FILE: (6, 6), Kind.VOLUME: (1, float("inf")),
}  # fmt: skip


def _check_step(step: Step, number: int, stages: set[str]) -> None:
    def refuse(why: str) -> UserError:
        return UserError(f"step {number}, {step.shown()}: {why}", code="invalid_step")

    least, most = _COUNTS[step.kind]
    if not least <= len(step.args) <= most:
        raise refuse(f"{step.kind} with {len(step.args)} arguments")
    if step.kind in (Kind.ENV, Kind.ARG) and len(step.args) % 2:
        raise refuse("a name without a value")
    if any("\0" in word for word in step.args):
        raise refuse("it holds a NUL")
    if step.kind is Kind.COPY and (step.files is None) == (step.stage is None):
        raise refuse("COPY takes from uploaded files, or from a stage")
    if step.stage is not None and step.stage not in stages:
        raise refuse(f"{step.stage!r} is no stage before it")


# Keys


def base_key(
    identity: str, guest: Guest, resources: Resources, engine: str, *, provision: bool
) -> str:
    """Of what a stage begins with; ``identity`` names the image's or snapshot's content."""
    size = [resources.vcpus, resources.memory_mib, resources.disk_mib]
    return _hash("base", VERSION, identity, _plain(guest), size, engine, provision)


def step_keys(first: str, steps: Iterable[Step], stages: Mapping[str, str]) -> list[str]:
    """One for each step; ``stages``: keys of the stages that steps copy from."""
    keys: list[str] = []
    key = first
    for step in steps:
        copied = stages[step.stage] if step.stage is not None else None
        key = _hash("step", key, *_content(step), copied)
        keys.append(key)
    return keys


def _content(step: Step) -> list[Any]:
    args: Sequence[str] = step.args
    if step.kind is Kind.ARG:
        pairs = zip(args[::2], args[1::2], strict=True)
        args = [word for pair in pairs if pair[0] not in PREDEFINED for word in pair]
    return [step.kind, list(args), step.files, step.keep_owner, step.escape]


def final_key(last: str, start: str, ready: str) -> str:
    return _hash("final", last, start, ready)


def _plain(guest: Guest) -> list[Any]:
    return [sorted(guest.env.items()), guest.user, guest.workdir, list(guest.volumes)]


def _hash(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()
