"""One function for each instruction of a Dockerfile's stage: what it adds to the stage. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from e2b_dockerfile_utils import (
    DockerfileInstruction,
    ShellLex,
    chomp_heredoc_content,
    parse_heredoc,
)

from agentenv.errors import UserError
from agentenv.template.recipe import Base, Kind, Step

SHELL = ("/bin/sh", "-c")
_URL = re.compile(r"^(?:[a-z][a-z0-9+.-]*://|git@)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FromContext:
    """COPY or ADD from the build context: sources are resolved patterns, the rest raw words."""

    sources: tuple[str, ...]
    dest: str
    owner: str
    mode: str
    unpacks: bool
    escape: str
    text: str
    line: int


def fault(line: int, what: str, why: str = "") -> UserError:
    return UserError(f"Dockerfile line {line}: {what}", why=why, code="dockerfile")


class Unknown(Exception):
    """A variable whose value only the base image knows."""


class Known(dict[str, str]):
    """Variables whose value is known here; asking for another one is an error."""

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ARG002
        if key not in self:
            raise Unknown(key)
        return self[key]


@dataclass
class Draft:
    """A stage while it is read. ``environment``: names that ENV has set, which ARG cannot hide.

    ``given`` are the arguments of the command line, ``preset`` those set before the first FROM;
    ``used`` collects the names that ARG asked for. ``origin`` finds the stage that COPY --from
    means; None is an image.
    """

    name: str
    base: Base
    escape: str
    given: Mapping[str, str]
    preset: Mapping[str, str]
    used: set[str]
    origin: Callable[[str], str | None]
    shell: tuple[str, ...] = SHELL
    known: Known = field(default_factory=Known)
    environment: set[str] = field(default_factory=set[str])
    steps: list[Step | FromContext] = field(default_factory=list[Step | FromContext])
    config: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, kind: Kind, args: Sequence[str], one: DockerfileInstruction) -> None:
        self.steps.append(
            Step(kind, tuple(args), escape=self.escape, text=one.original, line=one.start_line)
        )

    def settled(self, one: DockerfileInstruction, word: str) -> str | None:
        """The word's value, None if only the base knows it."""
        try:
            return lexed(one, word, self.known, self.escape)
        except Unknown:
            return None

    def said(self, one: DockerfileInstruction, word: str) -> str:
        """With what is known here; another variable stays as it is written."""
        return lexed(one, word, dict(self.known), self.escape, keep_unknown=True)


def lexed(
    one: DockerfileInstruction,
    word: str,
    env: Mapping[str, str],
    escape: str,
    *,
    keep_unknown: bool = False,
) -> str:
    try:
        return ShellLex(escape, env=env, skip_unset_env=keep_unknown).process_word(word)
    except ValueError as error:
        raise fault(one.start_line, f"{one.name}: {error}") from error


def flags_of(one: DockerfileInstruction) -> dict[str, str]:
    pairs = [flag.removeprefix("--").partition("=") for flag in one.flags]
    return {name: value for name, _, value in pairs}


def _run(one: DockerfileInstruction, stage: Draft) -> None:
    if flags_of(one).get("network", "default") != "default":
        raise fault(one.start_line, f"RUN {one.flags[0]} is not supported")
    if not one.args:
        raise fault(one.start_line, "RUN without a command")
    argv = tuple(one.args) if one.json else (*stage.shell, _command(one))
    stage.steps.append(Step(Kind.EXEC, argv, text=one.original, line=one.start_line))


def _command(one: DockerfileInstruction) -> str:
    """What the shell is given: a heredoc alone is the script itself."""
    line = one.args[0]
    if len(one.heredocs) != 1 or not parse_heredoc(line.strip()):
        return "".join([line, *(f"\n{h.content}{h.name}" for h in one.heredocs)])
    body = one.heredocs[0]
    text = chomp_heredoc_content(body.content) if body.chomp else body.content
    if not text.startswith("#!"):
        return text
    end = "AENV_END"
    while end in text:
        end += "_"
    return (
        f"script=$(mktemp) && cat >\"$script\" <<'{end}'\n{text}{end}\n"
        'chmod +x "$script" && "$script"\nstatus=$?; rm -f "$script"; exit $status'
    )


def _copy(one: DockerfileInstruction, stage: Draft) -> None:
    flags = flags_of(one)
    *sources, dest = one.args or [""]
    if not sources:
        raise fault(one.start_line, f"{one.name} takes sources and a destination")
    if parse_heredoc(dest):
        raise fault(one.start_line, f"a heredoc cannot be the destination of {one.name}")
    if len(sources) > 1 and not dest.rstrip("\"'").endswith("/"):
        raise fault(one.start_line, f"{one.name} of several sources takes a folder: {dest}/")
    how = (flags.get("chown", ""), flags.get("chmod", ""))
    if (origin := flags.get("from")) is not None:
        _copy_from(one, stage, origin, sources, (dest, *how))
        return
    files: list[str] = []
    for source in sources:
        if parse_heredoc(source):
            _write(one, stage, source, (dest, *how))
        else:
            files.append(_source(one, stage, source))
    if files:
        unpacks = one.name == "ADD"
        copied = FromContext(
            tuple(files), dest, *how, unpacks, stage.escape, one.original, one.start_line
        )
        stage.steps.append(copied)


def _source(one: DockerfileInstruction, stage: Draft, word: str) -> str:
    """A pattern in the build context: only what this file sets can be part of it."""
    try:
        found = lexed(one, word, stage.known, stage.escape)
    except Unknown as error:
        raise fault(
            one.start_line,
            f"{one.name} {word}: ${error} is not set in this Dockerfile",
            "what is copied can be named by its ARG and ENV only",
        ) from error
    if one.name == "ADD" and _URL.match(found):
        raise fault(one.start_line, "ADD of a URL is not supported", "RUN a program to load it")
    return found


def _copy_from(
    one: DockerfileInstruction,
    stage: Draft,
    origin: str,
    sources: Sequence[str],
    rest: tuple[str, str, str],
) -> None:
    if "$" in origin:
        raise fault(one.start_line, "COPY --from with a variable is not supported")
    found = stage.origin(origin)
    if found == stage.name:
        raise fault(one.start_line, f"COPY --from={origin} is the stage itself")
    for source in sources:
        step = Step(
            Kind.COPY,
            (source, *rest),
            stage=found or origin,
            keep_owner=True,
            escape=stage.escape,
            text=one.original,
            line=one.start_line,
        )
        stage.steps.append(step)


def _write(one: DockerfileInstruction, stage: Draft, word: str, rest: tuple[str, str, str]) -> None:
    name = parse_heredoc(word)
    body = next((h for h in one.heredocs if name and h.name == name.name), None)
    if body is None:
        raise fault(one.start_line, f"{word} has no text")
    text = chomp_heredoc_content(body.content) if body.chomp else body.content
    expand = "expand" if body.expand else ""
    stage.add(Kind.FILE, (body.name, text, *rest, expand), one)


def _env(one: DockerfileInstruction, stage: Draft) -> None:
    names, values = one.args[::3], one.args[1::3]
    if not names:
        raise fault(one.start_line, "ENV without a name")
    pairs = list(zip(names, values, strict=True))
    settled = {stage.said(one, name): stage.settled(one, value) for name, value in pairs}
    for name, value in settled.items():
        stage.environment.add(name)
        stage.known.pop(name, None)
        if value is not None:
            stage.known[name] = value
    stage.add(Kind.ENV, [word for pair in pairs for word in pair], one)


def _arg(one: DockerfileInstruction, stage: Draft) -> None:
    if not one.args:
        raise fault(one.start_line, "ARG without a name")
    for word in one.args:
        name, equals, default = word.partition("=")
        stage.used.add(name)
        if name in stage.given:
            argument(one, stage, name, quoted(stage.given[name]))
        elif equals:
            argument(one, stage, name, default)
        elif name in stage.preset:
            argument(one, stage, name, quoted(stage.preset[name]))


def argument(one: DockerfileInstruction, stage: Draft, name: str, word: str) -> None:
    """Set a build's argument from here on."""
    if name not in stage.environment:
        value = stage.settled(one, word)
        stage.known.pop(name, None)
        if value is not None:
            stage.known[name] = value
    stage.add(Kind.ARG, (name, word), one)


def quoted(value: str) -> str:
    """A word that stands for ``value``, whatever is in it."""
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _workdir(one: DockerfileInstruction, stage: Draft) -> None:
    stage.add(Kind.WORKDIR, _one_word(one), one)


def _user(one: DockerfileInstruction, stage: Draft) -> None:
    stage.add(Kind.USER, _one_word(one), one)


def _one_word(one: DockerfileInstruction) -> tuple[str]:
    if len(one.args) != 1:
        raise fault(one.start_line, f"{one.name} takes one argument")
    return (one.args[0],)


def _volume(one: DockerfileInstruction, stage: Draft) -> None:
    if not one.args:
        raise fault(one.start_line, "VOLUME without a folder")
    stage.add(Kind.VOLUME, one.args, one)


def _shell(one: DockerfileInstruction, stage: Draft) -> None:
    if not one.json or not one.args:
        raise fault(one.start_line, 'SHELL takes a JSON list, ["/bin/bash", "-c"]')
    stage.shell = tuple(one.args)


# What is recorded only.


def _argv(one: DockerfileInstruction, stage: Draft) -> list[str]:
    return list(one.args) if one.json or not one.args else [*stage.shell, one.args[0]]


def _cmd(one: DockerfileInstruction, stage: Draft) -> None:
    stage.config["cmd"] = _argv(one, stage)


def _entrypoint(one: DockerfileInstruction, stage: Draft) -> None:
    stage.config["entrypoint"] = _argv(one, stage)
    stage.config.setdefault("cmd", [])  # the base's command goes with the base's entrypoint


def _expose(one: DockerfileInstruction, stage: Draft) -> None:
    ports = [stage.said(one, word) for word in one.args]
    before = stage.config.get("exposed_ports", [])
    stage.config["exposed_ports"] = [*dict.fromkeys([*before, *ports])]


def _label(one: DockerfileInstruction, stage: Draft) -> None:
    pairs = zip(one.args[::3], one.args[1::3], strict=True)
    fresh = {stage.said(one, name): stage.said(one, value) for name, value in pairs}
    stage.config["labels"] = {**stage.config.get("labels", {}), **fresh}


def _maintainer(one: DockerfileInstruction, stage: Draft) -> None:
    labels = stage.config.get("labels", {})
    stage.config["labels"] = {**labels, "maintainer": " ".join(one.args)}


def _healthcheck(one: DockerfileInstruction, stage: Draft) -> None:
    kind, *words = one.args or [""]
    if kind.upper() not in ("CMD", "NONE") or (kind.upper() == "CMD" and not words):
        raise fault(one.start_line, "HEALTHCHECK takes NONE, or CMD and a command")
    test = words if one.json or not words else [*stage.shell, *words]
    stage.config["healthcheck"] = {"test": test, **flags_of(one)}


def _stopsignal(one: DockerfileInstruction, stage: Draft) -> None:
    stage.config["stop_signal"] = " ".join(one.args)


VERBS: Mapping[str, Callable[[DockerfileInstruction, Draft], None]] = {
    "RUN": _run,
    "COPY": _copy,
    "ADD": _copy,
    "ENV": _env,
    "ARG": _arg,
    "WORKDIR": _workdir,
    "USER": _user,
    "VOLUME": _volume,
    "SHELL": _shell,
    "CMD": _cmd,
    "ENTRYPOINT": _entrypoint,
    "EXPOSE": _expose,
    "LABEL": _label,
    "MAINTAINER": _maintainer,
    "HEALTHCHECK": _healthcheck,
    "STOPSIGNAL": _stopsignal,
}
