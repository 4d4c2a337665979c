"""Words of a build's steps with their variables put in, by BuildKit's rules. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from e2b_dockerfile_utils import ShellLex

from agentenv.errors import UserError

DOUBLE_QUOTED = "\\"  # what escapes in a text that is meant as within double quotes
_NEEDS_CARE = re.compile(r'\\["$\\]|["\\]')


def expand(text: str, variables: Mapping[str, str], escape: str | None = None) -> str:
    """``text`` with ``$NAME``, ``${NAME}``, ``${NAME:-default}`` … replaced; unknown: nothing.

    With ``escape`` (``\\`` or a backtick) it is a raw word of a Dockerfile, whose quotes go away.
    Without, as E2B's steps: within double quotes of a shell, so that only ``\\$``, ``\\"`` and
    ``\\\\`` are escapes. Raises UserError (``bad_substitution``).
    """
    if escape is None:
        text = '"' + _NEEDS_CARE.sub(_careful, text) + '"'
    return _process(text, ShellLex(escape or DOUBLE_QUOTED, env=variables, skip_unset_env=False))


def expand_text(text: str, variables: Mapping[str, str]) -> str:
    """As ``expand``, for the body of a heredoc: quotes are nothing special in it."""
    lex = ShellLex("\\", env=variables, skip_unset_env=False, skip_process_quotes=True)
    return _process(text, lex)


def _process(text: str, lex: ShellLex) -> str:
    try:
        return lex.process_word(text)
    except ValueError as error:
        raise UserError(
            "a variable cannot be put in", why=str(error), code="bad_substitution"
        ) from error


def _careful(found: re.Match[str]) -> str:
    """An escape stays one; a lone quote or backslash is meant as itself."""
    return found[0] if len(found[0]) > 1 else "\\" + found[0]
