"""The states of a sandbox and the moves between them. Pure."""

from __future__ import annotations

import enum

from agentenv.errors import Conflict


class State(enum.StrEnum):
    """Where a sandbox is in its life."""

    CREATING = "creating"  # being made; undone if the server dies meanwhile
    RUNNING = "running"
    KILLING = "killing"  # being ended; finished if the server dies meanwhile
    ENDED = "ended"  # gone, its post-mortem is kept for a while


class Request(enum.StrEnum):
    """What can be asked of a sandbox."""

    BOOTED = "booted"
    KILL = "kill"
    DIED = "died"
    GONE = "gone"


MOVES: dict[tuple[State, Request], State] = {
    (State.CREATING, Request.BOOTED): State.RUNNING,
    (State.CREATING, Request.KILL): State.KILLING,
    (State.CREATING, Request.DIED): State.KILLING,
    (State.RUNNING, Request.KILL): State.KILLING,
    (State.RUNNING, Request.DIED): State.KILLING,
    (State.KILLING, Request.KILL): State.KILLING,
    (State.KILLING, Request.DIED): State.KILLING,
    (State.KILLING, Request.GONE): State.ENDED,
}


def move(sandbox_id: str, state: State, request: Request) -> State:
    """The state after ``request``. Raises Conflict naming state, request and what is allowed."""
    try:
        return MOVES[state, request]
    except KeyError:
        allowed = sorted(r for s, r in MOVES if s is state) or ["nothing"]
        raise Conflict(
            f"sandbox {sandbox_id} is {state}, {request} is not possible now",
            why=f"possible: {', '.join(allowed)}",
            state=str(state),
        ) from None
