"""From a folder and its Dockerfile to what the server is told: steps, and the files they copy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentenv.errors import UserError
from agentenv.sdk.templates import Templates
from agentenv.template import context as contexts
from agentenv.template.context import Context, Packed
from agentenv.template.dockerfile import Dockerfile, parse
from agentenv.template.recipe import Step
from agentenv.template.streams import written


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a build that can be refused has been looked at."""

    dockerfile: Dockerfile
    context: Context
    stages: tuple[tuple[Step | Packed, ...], ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.dockerfile.warnings

    async def upload(self, templates: Templates, template_id: str) -> dict[str, Any]:
        """Bring what is not there yet to the server; the recipe as it takes it."""
        for stage in self.stages:
            for each in stage:
                if isinstance(each, Packed):
                    await _upload(templates, template_id, each)
        stages = [
            {
                "name": draft.name,
                "base": {"kind": draft.base.kind, "name": draft.base.name},
                "steps": [_json(each) for each in steps],
            }
            for draft, steps in zip(self.dockerfile.stages, self.stages, strict=True)
        ]
        return {"stages": stages, "config": dict(self.dockerfile.config)}


def plan(source: Path, file: Path | None, arguments: Mapping[str, str], target: str | None) -> Plan:
    """Read the Dockerfile and find what it copies. Raises UserError."""
    folder = source if source.is_dir() else source.parent
    path = file or (source / "Dockerfile" if source.is_dir() else source)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read", why=str(error), code="dockerfile") from error
    dockerfile = parse(text, arguments=arguments, target=target)
    context = Context.open(folder, path)
    stages = tuple(
        tuple(step if isinstance(step, Step) else context.pack(step) for step in stage.steps)
        for stage in dockerfile.stages
    )
    return Plan(dockerfile, context, stages)


async def _upload(templates: Templates, template_id: str, packed: Packed) -> None:
    assert packed.step.files is not None
    present, url = await templates.has_files(template_id, packed.step.files)
    if not present:
        await templates.put_files(url, written(partial(contexts.write, packed.items)))
        # Its name is what was read at first: a file that changed since would belie it.
        if await asyncio.to_thread(contexts.digest, packed.items) != packed.step.files:
            raise UserError("files changed while they were packed", fix="build again")


def _json(each: Step | Packed) -> dict[str, Any]:
    step = each.step if isinstance(each, Packed) else each
    values: dict[str, Any] = {
        "type": step.kind,
        "args": list(step.args),
        "filesHash": step.files,
        "fromStage": step.stage,
        "keepOwner": step.keep_owner or None,
        "escape": step.escape,
        "text": step.text or None,
        "line": step.line,
    }
    return {key: value for key, value in values.items() if value is not None}
