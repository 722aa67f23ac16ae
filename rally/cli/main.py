"""The command `rally`. A user's mistake is printed as one message, with exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rally import __version__
from rally.cli import (
    agent,
    data,
    demo,
    doctor,
    env,
    evaluate,
    from_verl,
    merge,
    recipes,
    replay,
    run,
    serve,
    sft,
    train,
    view,
)
from rally.cli.console import quiet_console
from rally.cli.os_errors import os_error_message
from rally.types import RallyError

app = typer.Typer(
    name="rally",
    help="Train language-model agents that use tools over several turns, with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


for command in (demo, run, train, sft, evaluate, merge, from_verl, recipes, replay, doctor, view, agent):
    app.add_typer(command.app)
app.add_typer(data.app, name="data")
app.add_typer(env.app, name="env")
app.add_typer(serve.app, name="serve")


@app.command()
def version() -> None:
    """Print the version."""
    quiet_console().note(f"rally {__version__}")


def _version_wanted(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version_wanted, is_eager=True)
    ] = False,
) -> None:
    """What stands before a command; its help is the application's."""


def main() -> None:
    """Entry point. Prints a user's mistake as one message instead of a traceback."""
    try:
        app(prog_name="rally")
    except RallyError as mistake:
        sys.stderr.write(f"rally: {_shown(str(mistake))}\n")
        sys.exit(mistake.exit_code)
    except OSError as error:
        message = os_error_message(error)
        if message is None:
            raise
        sys.stderr.write(f"rally: {_shown(message)}\n")
        sys.exit(2)


def _shown(message: str) -> str:
    """A message for the terminal. It may quote what a model or an environment wrote."""
    from rally.track.display_text import visible  # only here: every command would wait for Rich

    return visible(message)


if __name__ == "__main__":
    main()
