"""`unmask VERB`: finds the verb, runs it, and turns what goes wrong into an exit code.

0    done
1    `doctor` found something essential missing
2    the command, an option or the input is wrong
130  interrupted
141  whoever read our output went away
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from unmask.errors import UnmaskError

VERBS = {
    "generate": "unmask.cli.generate:generate",
    "chat": "unmask.cli.chat:chat",
    "problems": "unmask.cli.problems:problems",
    "train": "unmask.cli.train:train",
    "bench": "unmask.cli.bench:app",
    "profile": "unmask.cli.profile:profile",
    "models": "unmask.cli.models:models",
    "methods": "unmask.cli.models:methods",
    "doctor": "unmask.cli.doctor:doctor",
}

INTERRUPTED = 130
BROKEN_PIPE = 141


def load_verb(name: str) -> Any:
    """The command behind a verb; its module is imported here and not before."""
    module, function = VERBS[name].split(":")
    found = getattr(importlib.import_module(module), function)
    if isinstance(found, typer.Typer):  # a verb with verbs of its own
        return typer.main.get_command(found)
    app = typer.Typer(add_completion=False)
    app.command(name)(found)
    return typer.main.get_command(app)


class Verbs(typer.core.TyperGroup):
    """The verbs by name, each loaded when it is asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)  # the names alone: typer suggests the nearest of them

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        return load_verb(cmd_name) if cmd_name in VERBS else None

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except UnmaskError as error:
            report(error)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            complain("interrupted", style="dim")
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            _drop_stdout()
            raise typer.Exit(BROKEN_PIPE) from error


def report(error: UnmaskError) -> None:
    """The error as one line on stderr; its traceback too under ``UNMASK_DEBUG=1``."""
    if os.environ.get("UNMASK_DEBUG"):
        traceback.print_exception(error)
    complain("error: " + " ".join(str(error).splitlines()), style="red")


def complain(message: str, style: str) -> None:
    """One line on stderr, never folded."""
    from rich.console import Console

    Console(stderr=True).print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def _drop_stdout() -> None:
    """Sends what is still buffered nowhere, so that leaving the interpreter is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(cls=Verbs, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        from unmask._version import __version__

        print(f"unmask {__version__}")
        raise typer.Exit


Version = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")


@app.callback()
def root(version: Annotated[bool, Version] = False) -> None:
    """Diffusion language models: they write by filling in a masked canvas."""


def main() -> None:
    """The entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the rest
    app()
