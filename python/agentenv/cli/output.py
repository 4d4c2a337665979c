"""How the CLI speaks: tables and colours on a terminal, JSON when piped; errors to act on."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from agentenv.errors import AgentEnvError


class Form(enum.StrEnum):
    """What a list is shown as."""

    AUTO = "auto"
    TABLE = "table"
    JSON = "json"


Output = Annotated[
    Form, typer.Option("-o", "--output", help="auto: a table on a terminal, JSON when piped")
]


def interactive() -> bool:
    return sys.stdout.isatty()


def dump(value: Any) -> None:
    """A value as JSON: one document, indented on a terminal."""
    print(json.dumps(value, indent=2 if interactive() else None, default=str))


def as_json(form: Form) -> bool:
    return form is Form.JSON or (form is Form.AUTO and not interactive())


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    records: Any,
    form: Form = Form.AUTO,
) -> None:
    """``rows`` as a table or ``records`` as JSON, as ``form`` wants it."""
    if as_json(form):
        dump(records)
        return
    from rich.console import Console
    from rich.table import Table

    shown = [[str(cell) for cell in row] for row in rows]
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for position, name in enumerate(columns):
        # The first column is what other verbs take: whole on any terminal, the others wrap.
        whole = max((len(row[position]) for row in shown), default=0) if position == 0 else None
        drawn.add_column(name, min_width=whole, overflow="fold")
    for row in shown:
        drawn.add_row(*row)
    Console().print(drawn)


def error(failure: AgentEnvError) -> None:
    """What failed, why, what to do; as JSON when stderr is no terminal and stdout is piped."""
    if sys.stderr.isatty() or interactive():
        print(f"aenv: {failure.what}", file=sys.stderr)
        if failure.why:
            print(f"  why: {failure.why}", file=sys.stderr)
        if failure.fix:
            print(f"  do:  {failure.fix}", file=sys.stderr)
        return
    fault = {"code": failure.code, "message": failure.message, **failure.details}
    print(json.dumps({"error": fault}, default=str), file=sys.stderr)


def note(text: str) -> None:
    """Progress for people, on stderr, only where somebody looks."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
