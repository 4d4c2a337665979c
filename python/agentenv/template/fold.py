"""What steps make of a state, and what they ask of the guest, with every variable put in. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentenv.errors import UserError
from agentenv.model import Guest, ImageConfig
from agentenv.template.recipe import Kind, Step
from agentenv.template.words import expand, expand_text

DEFAULT_USER, DEFAULT_HOME = "user", "/home/user"
SHELL = ("/bin/bash", "-l", "-c")


@dataclass(frozen=True, slots=True)
class State:
    """What steps begin with. ``args`` are known while building only; ``workdir`` is absolute."""

    env: Mapping[str, str]
    user: str
    workdir: str
    args: Mapping[str, str] = field(default_factory=dict[str, str])
    volumes: tuple[str, ...] = ()

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment wins over a build's arguments."""
        return {**self.args, **self.env}

    def guest(self) -> Guest:
        """What sandboxes of a template that ends in this state are told."""
        return Guest(dict(self.env), self.user, self.workdir, self.volumes)


def state_of_image(config: ImageConfig, *, provision: bool) -> State:
    """Docker's rules, or with ``provision`` E2B's: their user, in its home."""
    env = dict(pair.split("=", 1) for pair in config.env if "=" in pair)
    if provision:
        return State(env, DEFAULT_USER, DEFAULT_HOME, volumes=config.volumes)
    return State(env, config.user or "root", config.working_dir or "/", volumes=config.volumes)


def state_of_guest(guest: Guest) -> State:
    """That of a template which was built."""
    user = guest.user or DEFAULT_USER
    return State(guest.env, user, guest.workdir or DEFAULT_HOME, volumes=guest.volumes)


@dataclass(frozen=True, slots=True)
class Run:
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    user: str
    command: str


@dataclass(frozen=True, slots=True)
class Copy:
    """``dest`` is absolute and ends with ``/`` if it is meant as a folder; ``owner`` None keeps
    the archive's."""

    source: str
    dest: str
    owner: str | None
    mode: int | None
    files: str | None
    stage: str | None


@dataclass(frozen=True, slots=True)
class Write:
    """A file called ``name`` if ``dest`` is a folder."""

    name: str
    content: str
    dest: str
    owner: str
    mode: int | None


@dataclass(frozen=True, slots=True)
class MakeFolder:
    path: str
    owner: str


@dataclass(frozen=True, slots=True)
class AddUser:
    """If there is none of that name."""

    name: str


Action = Run | Copy | Write | MakeFolder | AddUser


def fold(state: State, step: Step) -> tuple[State, Action | None]:
    """What ``step`` makes of ``state``, and what the guest has to do. Raises UserError."""
    match step.kind:
        case Kind.ENV:
            return replace(state, env={**state.env, **_pairs(state, step)}), None
        case Kind.ARG:
            return replace(state, args={**state.args, **_pairs(state, step)}), None
        case Kind.VOLUME:
            folders = tuple(_word(state, step, word) for word in step.args)
            return replace(state, volumes=tuple(dict.fromkeys((*state.volumes, *folders)))), None
        case Kind.USER:
            return _user(state, step)
        case Kind.WORKDIR:
            folder = absolute(_word(state, step, step.args[0]), state.workdir)
            return replace(state, workdir=folder), MakeFolder(folder, state.user)
        case Kind.RUN | Kind.EXEC:
            return state, _run(state, step)
        case Kind.COPY:
            return state, _copy(state, step)
        case Kind.FILE:
            return state, _file(state, step)


def _word(state: State, step: Step, word: str) -> str:
    return expand(word, state.variables, step.escape)


def _pairs(state: State, step: Step) -> dict[str, str]:
    """Names and values. A Dockerfile's value sees what was set before its step, E2B's also what
    stands before it in the step."""
    pairs: dict[str, str] = {}
    for word, value in zip(step.args[::2], step.args[1::2], strict=True):
        seen = state if step.escape else replace(state, env={**state.env, **pairs})
        name = _word(seen, step, word)
        if not name or "=" in name:
            raise UserError(f"{name!r} is no name of a variable", code="invalid_step")
        pairs[name] = _word(seen, step, value)
    return pairs


def _user(state: State, step: Step) -> tuple[State, Action | None]:
    user = _word(state, step, step.args[0])
    if not user:
        raise UserError("USER without a name", code="invalid_step")
    name = user.partition(":")[0]
    # Docker makes no users; E2B does.
    makes = step.escape is None and not name.isdigit()
    return replace(state, user=user), AddUser(name) if makes else None


def _run(state: State, step: Step) -> Run:
    if step.kind is Kind.EXEC:
        return Run(step.args, state.variables, state.workdir, state.user, step.args[-1])
    command, user = step.args[0], step.args[1] if len(step.args) > 1 else ""
    return Run((*SHELL, command), state.variables, state.workdir, user or state.user, command)


def _copy(state: State, step: Step) -> Copy:
    source, dest, owner, mode = (*step.args, "", "")[:4]
    if step.stage is not None:
        source = absolute(_word(state, step, source), "/", keep_slash=True)
    owner = _word(state, step, owner)
    default = None if step.keep_owner else state.user
    dest = absolute(_word(state, step, dest), state.workdir, keep_slash=True)
    return Copy(source, dest, owner or default, _mode(state, step, mode), step.files, step.stage)


def _file(state: State, step: Step) -> Write:
    name, content, dest, owner, mode, how = step.args
    if how == "expand":
        content = expand_text(content, state.variables)
    dest = absolute(_word(state, step, dest), state.workdir, keep_slash=True)
    owner = _word(state, step, owner) or "root"
    return Write(name, content, dest, owner, _mode(state, step, mode))


def _mode(state: State, step: Step, text: str) -> int | None:
    text = _word(state, step, text)
    if not text:
        return None
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise UserError(
            f"{text!r} is no mode", why="it takes octal digits, 0755", code="invalid_step"
        )
    return mode


def absolute(path: str, workdir: str, *, keep_slash: bool = False) -> str:
    """``path`` from ``workdir`` on, cleaned; with ``keep_slash`` what names a folder still does."""
    full = posixpath.normpath(posixpath.join(workdir, path or "."))
    full = "/" + full.lstrip("/")  # two slashes are one
    means_folder = path.endswith(("/", "/.")) or path in ("", ".")
    return full + "/" if keep_slash and means_folder and full != "/" else full


def captured(actions: Sequence[Action | None]) -> list[bool]:
    """After which steps the guest is kept: each command, and what was copied before one.

    Copies are cheap to repeat, so a run of them is kept once.
    """
    marks: list[bool] = []
    dirty = False
    for position, action in enumerate(actions):
        dirty = dirty or action is not None
        following = actions[position + 1] if position + 1 < len(actions) else None
        is_last = position + 1 == len(actions)
        marks.append(dirty and (is_last or isinstance(action, Run) or isinstance(following, Run)))
        dirty = dirty and not marks[-1]
    return marks
