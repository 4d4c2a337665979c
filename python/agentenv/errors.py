"""The error tree: four kinds, told apart by who must act.

Each error says what failed, why, and what to do, and carries a stable machine
code, the HTTP status the API answers and the exit code the CLI leaves with.
Everything that reaches a user goes through one of these; anything else is a
bug and is answered as ``internal``.
"""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class AgentEnvError(Exception):
    """Base of all errors shown to users.

    ``code`` is stable across versions; ``details`` holds machine-readable
    facts (for lifecycle errors at least ``state``, the sandbox's state now).
    """

    code = "internal"
    http_status = 500
    exit_code = 70

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        code: str | None = None,
        http_status: int | None = None,
        **details: Any,
    ) -> None:
        self.what, self.why, self.fix = what, why, fix
        if code is not None:
            self.code = code
        if http_status is not None:
            self.http_status = http_status
        self.details: dict[str, Any] = details
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """One line: what failed, why, what to do."""
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.fix:
            text += f" ({self.fix})"
        return text


class UserError(AgentEnvError):
    """The request cannot be honoured as it was made; the caller must change it."""

    code = "invalid_request"
    http_status = 400
    exit_code = 64


class NotFound(UserError):
    """The request names something that does not exist."""

    code = "not_found"
    http_status = 404


class Conflict(UserError):
    """The request does not fit the state of its object; the state is in ``details``."""

    code = "conflict"
    http_status = 409


class Unauthorized(UserError):
    """No key, or one that is not known."""

    code = "unauthorized"
    http_status = 401
    exit_code = 77


class ImageError(AgentEnvError):
    """The image or its source is at fault: unknown, damaged, foreign, hostile."""

    code = "image_invalid"
    http_status = 422
    exit_code = 65


class GuestError(AgentEnvError):
    """The guest failed: it did not boot, panicked, ran out of memory, does not answer."""

    code = "guest_failed"
    http_status = 500
    exit_code = 69


class InfraError(AgentEnvError):
    """The node or something it depends on failed; the operator must act."""

    code = "infrastructure"
    http_status = 503
    exit_code = 71


class MissingTool(InfraError):
    """A system tool or file is missing or too old; ``fix`` names the command that brings it."""

    code = "missing_tool"


@contextmanager
def faults(what: str) -> Generator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        raise fault(what, error) from error


def fault(what: str, error: OSError) -> InfraError:
    """What a failed file operation means to its operator."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InfraError(
            what,
            why="no space is left on the disk",
            fix="free some: aenv image ls, aenv image rm",
            code="disk_full",
            http_status=507,
        )
    return InfraError(what, why=str(error), code="file_failed")
