"""`unmask models` and `unmask methods`: what can be run, and how."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from unmask.cli.catalog import CANVAS, GB, LAYOUT_ONLY, NOT_HERE, TESTED, Model, known_models
from unmask.cli.options import JsonOption
from unmask.methods import METHODS, Method

DTYPE = "bfloat16"
PIPE_WIDTH = 200
ROOMY = 100  # columns from which the table of methods finds its own widths
LONGEST_AXIS = len("strict_threshold=True")
SHORT = {TESTED: "yes", LAYOUT_ONLY: "layout only", NOT_HERE: "not here"}
LEGEND = f"""\
Weights in {DTYPE}. Memory is the weights with keys and values of a {CANVAS}-token canvas; leave room above it.
Tried here: yes is {TESTED}; layout only is {LAYOUT_ONLY}.
Other checkpoints of these layouts load by directory or hub name."""


def plain(model: Model) -> dict[str, Any]:
    """A line of the catalogue as data; bytes are of bfloat16."""
    sizes = model.sizes
    return {
        "name": model.name,
        "layout": model.layout,
        "num_parameters": sizes and sizes.num_parameters,
        "weight_bytes": sizes and sizes.weight_bytes(DTYPE),
        "kv_bytes_per_token": sizes and sizes.kv_bytes_per_token(DTYPE),
        "memory_bytes": sizes and sizes.memory(DTYPE),
        "licence": model.licence,
        "method": model.method,
        "status": model.status,
    }


def gigabytes(value: int | None) -> str:
    """``16.0 GB``; megabytes below one."""
    if value is None:
        return "-"
    return f"{value / GB:.1f} GB" if value >= GB else f"{value / 1e6:.0f} MB"


def count(value: int | None) -> str:
    """``8.02 B`` parameters."""
    if value is None:
        return "-"
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"


def models(as_json: JsonOption = False) -> None:
    """List the models whose layout is known, and what they need."""
    rows = [plain(model) for model in known_models()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = narrow_table("model", "params", "weights", "memory", "licence", "method", "tried here")
    for row in rows:
        sizes = [count(row["num_parameters"]), gigabytes(row["weight_bytes"]), gigabytes(row["memory_bytes"])]
        table.add_row(row["name"], *sizes, row["licence"] or "its page", row["method"], SHORT[row["status"]])
    console = wide_console()
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)


def methods(as_json: JsonOption = False) -> None:
    """List the decoding methods."""
    rows = [_method(method) for method in METHODS.values()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = wide_console()
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("what it does")
    table.add_column("axes", width=LONGEST_AXIS if console.width < ROOMY else None)
    table.add_column("arXiv", no_wrap=True)
    for row in rows:
        table.add_row(row["name"], row["title"], row["axes"], row["paper"].removeprefix("arXiv "))
    console.print(table)
    console.print("Axes: where tokens are decided / what is recomputed / what is tried ahead / sampling", style="dim")


def _method(method: Method) -> dict[str, str]:
    return {"name": method.name, "title": method.title, "axes": method.describe, "paper": method.paper}


def narrow_table(first: str, *others: str) -> Table:
    """A table of which only the first column gives way when the terminal is narrow."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, no_wrap=True)
    return table


def wide_console() -> Console:
    """Stdout; a pipe or a file has room enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)
