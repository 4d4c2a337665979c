"""takes the API by `sdk` (and, for images, the home itself), gives people the command `aenv`.

One verb per file; each file's ``command`` is registered here.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import agentenv
from agentenv.cli import output
from agentenv.errors import AgentEnvError

VERBS = (
    "serve", "doctor", "image", "template", "store", "gc", "run", "start", "exec", "shell", "cp",
    "port", "pause", "resume", "snapshot", "snapshots", "fork", "rollback", "tree", "diff",
    "ls", "inspect", "metrics", "logs", "kill", "down", "config",
)  # fmt: skip

app = typer.Typer(
    name="aenv",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        print(agentenv.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it")
    ] = False,
) -> None:
    """Isolated sandboxes for AI agents, made from any OCI image."""


def register() -> None:
    """Load the verbs; done on use so that `import agentenv.cli` stays light."""
    from importlib import import_module

    for verb in VERBS:
        module = import_module(f"agentenv.cli.{verb}_")
        if isinstance(module.command, typer.Typer):
            app.add_typer(module.command, name=verb)
        else:
            app.command(verb, **getattr(module, "OPTIONS", {}))(module.command)


def main() -> None:
    """Entry point of `aenv`: errors become one line (or JSON) on stderr and an exit code."""
    register()
    try:
        app()
    except AgentEnvError as error:
        output.error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
