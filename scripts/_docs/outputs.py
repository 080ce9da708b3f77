"""What the code blocks of a page print, written below them: after a change of the weights, every page has to say it."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from typing import Any

PYTHON = re.compile(r"^```python\n(.*?)^```(\n\n```text\n.*?^```)?", re.M | re.S)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.M | re.S)


def written(page: str) -> str:
    """The page with the outputs of its Python and console blocks; those of Python share their names."""
    names: dict[str, Any] = {}

    def python(match: re.Match[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(match[1], "<page>", "exec"), names)
        shown = f"\n\n```text\n{out.getvalue()}```" if match[2] else ""
        return f"```python\n{match[1]}```{shown}"

    return CONSOLE.sub(console, PYTHON.sub(python, page))


def console(match: re.Match[str]) -> str:
    """Each `$ unmask ...` of a block with what it prints."""
    parts = [f"$ {command}\n{printed(command)}" for command in re.findall(r"^\$ (.*)$", match[1], re.M)]
    return f"```console\n{''.join(parts)}```"


def printed(command: str) -> str:
    """What a command writes to standard output."""
    from typer.testing import CliRunner

    from unmask.cli.main import app

    result = CliRunner().invoke(app, shlex.split(command)[1:])
    if result.exit_code:
        raise SystemExit(f"{command} failed: {result.output}")
    return str(result.stdout)
