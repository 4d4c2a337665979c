"""The states of a sandbox and the moves between them. Pure."""

from __future__ import annotations

import enum

from agentenv.errors import Conflict


class State(enum.StrEnum):
    """Where a sandbox is in its life. Recorded are creating, running, paused and ended: whoever
    finds a record of a server that died goes on from there."""

    CREATING = "creating"  # being made; undone if the server dies meanwhile
    RUNNING = "running"
    PAUSING = "pausing"  # being saved; runs on if that fails
    PAUSED = "paused"  # a snapshot, and nothing that runs
    RESUMING = "resuming"  # being restored; paused as before if that fails
    KILLING = "killing"  # being ended; finished if the server dies meanwhile
    ENDED = "ended"  # gone, its post-mortem is kept for a while

    @property
    def shown(self) -> State:
        """The state that clients know it in: the one it comes from."""
        return _SHOWN.get(self, self)


_SHOWN = {State.PAUSING: State.RUNNING, State.RESUMING: State.PAUSED}


class Request(enum.StrEnum):
    """What can be asked of a sandbox, and what comes of it."""

    BOOTED = "booted"
    PAUSE = "pause"
    SAVED = "saved"
    RESUME = "resume"
    FAILED = "failed"
    KILL = "kill"
    DIED = "died"
    GONE = "gone"


ASKED = frozenset((Request.PAUSE, Request.RESUME, Request.KILL))
"""By people; the others are what comes of it."""

MOVES: dict[tuple[State, Request], State] = {
    (State.CREATING, Request.BOOTED): State.RUNNING,
    (State.CREATING, Request.KILL): State.KILLING,
    (State.CREATING, Request.DIED): State.KILLING,
    (State.RUNNING, Request.PAUSE): State.PAUSING,
    (State.RUNNING, Request.KILL): State.KILLING,
    (State.RUNNING, Request.DIED): State.KILLING,
    (State.PAUSING, Request.SAVED): State.PAUSED,
    (State.PAUSING, Request.FAILED): State.RUNNING,
    (State.PAUSING, Request.DIED): State.KILLING,
    (State.PAUSED, Request.RESUME): State.RESUMING,
    (State.PAUSED, Request.KILL): State.KILLING,
    (State.RESUMING, Request.BOOTED): State.RUNNING,
    (State.RESUMING, Request.FAILED): State.PAUSED,
    (State.KILLING, Request.KILL): State.KILLING,
    (State.KILLING, Request.DIED): State.KILLING,
    (State.KILLING, Request.GONE): State.ENDED,
}


def move(sandbox_id: str, state: State, request: Request) -> State:
    """The state after ``request``. Raises Conflict naming state, request and what is allowed."""
    try:
        return MOVES[state, request]
    except KeyError:
        raise impossible(sandbox_id, state, request) from None


def impossible(sandbox_id: str, state: State, asked: str) -> Conflict:
    """What is ``asked`` for is not for a sandbox in that state."""
    allowed = sorted({r for s, r in MOVES if s is state and r in ASKED}) or ["nothing"]
    return Conflict(
        f"sandbox {sandbox_id} is {state}, {asked} is not possible now",
        why=f"possible: {', '.join(allowed)}",
        state=str(state.shown),
    )
