"""A Dockerfile as a recipe whose copies from the build context are still to be packed. Pure.

Read by the parser of E2B's SDKs, a port of BuildKit's (docs/decisions/080). What is not supported
is refused by name and line before anything runs: ``_FLAGS`` has all that is, by instruction.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from e2b_dockerfile_utils import (
    DockerfileAst,
    DockerfileInstruction,
    DockerfileSyntaxError,
    parse_dockerfile_ast,
)

from agentenv.errors import UserError
from agentenv.template.instructions import (
    VERBS,
    Draft,
    FromContext,
    Known,
    argument,
    fault,
    flags_of,
    lexed,
    quoted,
)
from agentenv.template.recipe import PREDEFINED, Base, Origin, Step

PLATFORM = {
    "TARGETPLATFORM": "linux/amd64", "TARGETOS": "linux", "TARGETARCH": "amd64",
    "BUILDPLATFORM": "linux/amd64", "BUILDOS": "linux", "BUILDARCH": "amd64",
    "TARGETVARIANT": "", "BUILDVARIANT": "",
}  # fmt: skip
_FLAGS: Mapping[str, frozenset[str]] = {
    "FROM": frozenset({"platform"}),
    "RUN": frozenset({"network"}),
    "COPY": frozenset({"from", "chown", "chmod", "link"}),
    "ADD": frozenset({"chown", "chmod", "link"}),
    "HEALTHCHECK": frozenset({"interval", "timeout", "start-period", "start-interval", "retries"}),
}


@dataclass(frozen=True, slots=True)
class DraftStage:
    name: str
    base: Base
    steps: tuple[Step | FromContext, ...]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """``config`` holds what is recorded of the image: ``cmd``, ``entrypoint``, ``labels``,
    ``exposed_ports``, ``healthcheck``, ``stop_signal``, as far as named. ``warnings`` for people.
    """

    stages: tuple[DraftStage, ...]
    config: Mapping[str, Any]
    warnings: tuple[str, ...]

    @property
    def command(self) -> str:
        """What ENTRYPOINT and CMD start, as a shell's text; empty if neither is named."""
        return shlex.join((*self.config.get("entrypoint", ()), *self.config.get("cmd", ())))


def parse(
    text: str, *, arguments: Mapping[str, str] | None = None, target: str | None = None
) -> Dockerfile:
    """``arguments`` are those of ``--build-arg``; ``target`` names the stage to stop after.

    Raises UserError (``dockerfile``) naming the line.
    """
    try:
        tree = parse_dockerfile_ast(text)
    except DockerfileSyntaxError as error:
        what = str(error).removeprefix("Dockerfile parse error ").removeprefix("on ")
        raise UserError(f"the Dockerfile cannot be read: {what}", code="dockerfile") from error
    return _Reader(tree, dict(arguments or {})).read(target)


class _Reader:
    def __init__(self, tree: DockerfileAst, arguments: dict[str, str]) -> None:
        self._tree, self._given = tree, arguments
        self._escape = tree.escape_token
        self._preset: dict[str, str] = dict(PLATFORM)
        self._used: set[str] = set(PREDEFINED)
        self._stages: list[Draft] = []

    def read(self, target: str | None) -> Dockerfile:
        for one in self._tree.instructions:
            self._check(one)
            if one.name == "FROM":
                self._from(one)
            elif not self._stages:
                self._before_from(one)
            else:
                VERBS[one.name](one, self._stages[-1])
        if not self._stages:
            raise UserError("the Dockerfile has no FROM", code="dockerfile")
        last = self._target(target)
        stages = [DraftStage(s.name, s.base, tuple(s.steps)) for s in self._needed(last)]
        return Dockerfile(tuple(stages), last.config, self._warnings())

    def _warnings(self) -> tuple[str, ...]:
        unused = sorted(self._given.keys() - self._used)
        return (
            *(f"line {warning.line}: {warning.message}" for warning in self._tree.warnings),
            *(f"build argument {name} is not used" for name in unused),
        )

    def _check(self, one: DockerfileInstruction) -> None:
        if one.name == "ONBUILD":
            raise fault(one.start_line, "ONBUILD is not supported", "put it where it shall act")
        for flag in one.flags:
            name = flag.partition("=")[0]
            if name.removeprefix("--") not in _FLAGS.get(one.name, ()):
                raise fault(one.start_line, f"{one.name} {name} is not supported")

    def _before_from(self, one: DockerfileInstruction) -> None:
        if one.name != "ARG":
            raise fault(one.start_line, f"{one.name} comes before FROM")
        for word in one.args:
            name, equals, default = word.partition("=")
            self._used.add(name)
            if name in self._given:
                self._preset[name] = self._given[name]
            elif equals:
                self._preset[name] = lexed(one, default, self._preset, self._escape)

    def _from(self, one: DockerfileInstruction) -> None:
        words = one.args
        if not (len(words) == 1 or (len(words) == 3 and words[1].lower() == "as")):
            raise fault(one.start_line, "FROM takes IMAGE, or IMAGE AS NAME")
        image = lexed(one, words[0], self._preset, self._escape)
        if not image:
            raise fault(one.start_line, f"FROM {words[0]} names no image")
        if image == "scratch":
            raise fault(one.start_line, "FROM scratch is not supported", "begin with an image")
        platform = lexed(one, flags_of(one).get("platform", ""), self._preset, self._escape)
        if platform not in ("", "linux/amd64", "linux"):
            what = f"FROM --platform={platform} is not supported"
            raise fault(one.start_line, what, "nodes run linux/amd64")
        name = words[2].lower() if len(words) == 3 else str(len(self._stages))
        if self._find(name) is not None and len(words) == 3:
            raise fault(one.start_line, f"there is a stage {name} already")
        stage = self._begun(name, image)
        for key in sorted(PREDEFINED & self._given.keys()):
            argument(one, stage, key, quoted(self._given[key]))
        self._stages.append(stage)

    def _begun(self, name: str, image: str) -> Draft:
        """A stage from another one goes on with what that has set."""
        parent = self._find(image)
        base = Base(Origin.STAGE, parent.name) if parent else Base(Origin.NAME, image)
        stage = Draft(
            name, base, self._escape, self._given, self._preset, self._used, self._origin
        )  # fmt: skip
        if parent:
            names = parent.environment & parent.known.keys()
            stage.known = Known({key: parent.known[key] for key in names})
            stage.environment = set(parent.environment)
            stage.shell, stage.config = parent.shell, dict(parent.config)
        return stage

    def _find(self, name: str) -> Draft | None:
        return next((stage for stage in self._stages if stage.name == name.lower()), None)

    def _origin(self, name: str) -> str | None:
        """The stage that COPY --from means, by name or number; None: an image."""
        if found := self._find(name):
            return found.name
        if name.isdigit() and int(name) < len(self._stages):
            return self._stages[int(name)].name
        return None

    def _target(self, target: str | None) -> Draft:
        if target is None:
            return self._stages[-1]
        name = self._origin(target)
        found = self._find(name) if name else None
        if found is None:
            names = ", ".join(stage.name for stage in self._stages)
            raise UserError(
                f"the Dockerfile has no stage {target!r}", why=f"it has {names}", code="dockerfile"
            )
        return found

    def _needed(self, last: Draft) -> list[Draft]:
        """What ``last`` stands on, in order: images that are copied from, stages, itself."""
        wanted = {last.name}
        for stage in reversed(self._stages[: self._stages.index(last) + 1]):
            if stage.name not in wanted:
                continue
            copied = [step.stage for step in stage.steps if isinstance(step, Step)]
            wanted.update(name for name in copied if name)
            if stage.base.kind is Origin.STAGE:
                wanted.add(stage.base.name)
        images = sorted(wanted - {stage.name for stage in self._stages})
        return [
            *(self._begun(name, name) for name in images),
            *(stage for stage in self._stages if stage.name in wanted),
        ]
