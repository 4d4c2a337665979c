"""What kernels say (Jupyter's messaging protocol, IOPub), as E2B's events. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, cast

Event = dict[str, Any]

_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def event_of(kind: str, content: Mapping[str, Any]) -> Event | None:
    """One message's event; None if nobody is told of it."""
    match kind:
        case "stream":
            return _output(str(content["name"]), str(content["text"]))
        case "execute_result":
            return _result(content["data"], is_main=True)
        case "display_data" | "update_display_data":
            return _result(content["data"], is_main=False)
        case "error":
            name, lines = str(content["ename"]) or "Error", content["traceback"]
            return error(name, str(content["evalue"]), "\n".join(lines))
        case "execute_input":
            return {
                "type": "number_of_executions",
                "execution_count": content["execution_count"],
            }
        case _:
            return None


def error(name: str, value: str, traceback: str = "") -> Event:
    return {"type": "error", "name": name, "value": value, "traceback": _ESCAPES.sub("", traceback)}


def end() -> Event:
    return {"type": "end_of_execution"}


def _output(stream: str, text: str) -> Event:
    kind = "stderr" if stream == "stderr" else "stdout"
    return {"type": kind, "text": text, "timestamp": time.time_ns()}


def _result(data: Mapping[str, Any], *, is_main: bool) -> Event:
    """Formats that have no field of their own go to ``extra``."""
    event: Event = {"type": "result"}
    extra: dict[str, Any] = {}
    for kind, value in data.items():
        content = value if kind == "application/json" else _text(value)
        if kind in _FIELDS:
            event[_FIELDS[kind]] = _without_quotes(content) if kind == "text/plain" else content
        else:
            extra[kind] = content
    if extra:
        event["extra"] = extra
    return {**event, "is_main_result": is_main}


def _text(value: Any) -> Any:
    """The format lets a kernel send text as its lines."""
    return "".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else value


def _without_quotes(text: Any) -> Any:
    """E2B shows a string as what it holds, not as it is written in the language."""
    is_quoted = isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text
