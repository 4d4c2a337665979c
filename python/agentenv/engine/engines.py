"""The engines of a node: which there are, and which one runs what nobody chose one for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from agentenv.config import AUTO, ENGINE_WORDS
from agentenv.engine.contract import Capabilities, Engine
from agentenv.errors import AgentEnvError, Conflict, InfraError, UserError

log = logging.getLogger(__name__)

KVM = "kvm"


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that is taken where none is asked for, and why."""

    engine: str
    reason: str


class Engines:
    """``made`` by name; ``missing`` says why another cannot be; ``wanted`` is the configuration's
    word. ``prepare`` first, if any is to run something."""

    def __init__(
        self, made: Mapping[str, Engine], missing: Mapping[str, AgentEnvError], wanted: str
    ) -> None:
        self._made, self._missing, self._wanted = dict(made), dict(missing), wanted
        self._choice: Choice | None = None

    async def prepare(self) -> None:
        """Try each and choose. Raises MissingTool, InfraError if the one that the configuration
        names does not work, or none does."""
        if self._wanted in self._missing:
            raise self._missing[self._wanted]
        for name, engine in list(self._made.items()):
            try:
                await engine.capabilities()
            except AgentEnvError as error:
                if name == self._wanted:
                    raise
                log.warning("engine %s is not used: %s", name, error.message)
                self._missing[name] = error
        able = {name: await self._made[name].capabilities() for name in self.usable}
        self._choice = choose(able, {k: v.message for k, v in self._missing.items()}, self._wanted)

    @property
    def usable(self) -> tuple[str, ...]:
        return tuple(name for name in self._made if name not in self._missing)

    @property
    def missing(self) -> Mapping[str, str]:
        """Why others cannot be used."""
        return {name: error.message for name, error in self._missing.items()}

    @property
    def choice(self) -> Choice:
        assert self._choice is not None
        return self._choice

    def named(self, name: str) -> Engine:
        """Raises Conflict (``engine_unavailable``)."""
        if name in self._missing or name not in self._made:
            error = self._missing.get(name)
            raise Conflict(
                f"the engine {name} does not work on this node",
                why=error.message if error else "",
                fix=f"use {' or '.join(self.usable)}, or see aenv doctor",
                code="engine_unavailable",
            )
        return self._made[name]

    def asked(self, name: str | None) -> str:
        """The name of the engine for who asks for this one. Raises UserError, Conflict."""
        if name is None or name == AUTO:
            return self.choice.engine
        if name not in ENGINE_WORDS:
            takes = ", ".join(ENGINE_WORDS)
            raise UserError(f"there is no engine {name!r}", fix=f"it takes one of {takes}")
        self.named(name)
        return name

    async def capabilities(self) -> Mapping[str, Capabilities]:
        return {name: await self._made[name].capabilities() for name in self.usable}

    async def sweep(self, keep: set[str]) -> None:
        """See ``Engine.sweep``."""
        for engine in self._made.values():
            await engine.sweep(keep)

    async def forget(self, machine: str) -> None:
        """See ``Engine.forget``."""
        for engine in self._made.values():
            await engine.forget(machine)

    async def forget_all_but(self, keep: set[str]) -> None:
        """See ``Engine.forget``."""
        for engine in self._made.values():
            await engine.forget_all_but(keep)

    async def leave(self) -> None:
        """See ``Engine.leave``."""
        for engine in self._made.values():
            await engine.leave()


def choose(able: Mapping[str, Capabilities], missing: Mapping[str, str], wanted: str) -> Choice:
    """Raises InfraError (``no_engine``)."""
    if wanted != AUTO:
        return Choice(wanted, "the configuration names it")
    qemu = able.get("qemu")
    if qemu and qemu.accelerator == KVM:
        return Choice("qemu", "KVM works here")
    said = " ".join(qemu.notes) if qemu else f"no QEMU: {missing.get('qemu', '')}"
    if "gvisor" in able:
        return Choice("gvisor", f"at native speed without KVM ({said})")
    if qemu:
        return Choice("qemu", f"emulated ({said}; no gVisor: {missing.get('gvisor', '')})")
    raise InfraError(
        "no engine works on this node",
        why="; ".join(f"{name}: {why}" for name, why in missing.items()),
        fix="aenv doctor says what each of them lacks",
        code="no_engine",
    )
