"""`unmask problems`: word problems as JSON lines."""

from __future__ import annotations

import importlib
import json
from typing import Annotated, Optional

import typer

Steps = Optional[int]  # noqa: UP045


def problems(
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same problems.")] = 0,
    n: Annotated[int, typer.Option("--n", "-n", min=0, help="How many lines.")] = 10,
    split: Annotated[str, typer.Option("--split", help="train or test; no problem is in both.")] = "test",
    per_request: Annotated[Steps, typer.Option("--per-request", min=1, help="Problems in one question.")] = None,
    min_steps: Annotated[Steps, typer.Option("--min-steps", min=1, help="Fewest steps of arithmetic.")] = None,
    max_steps: Annotated[Steps, typer.Option("--max-steps", min=1, help="Most steps of arithmetic.")] = None,
) -> None:
    """Write word problems with their answers, one JSON object a line."""
    optional = {"min_steps": min_steps, "max_steps": max_steps, "per_request": per_request}
    given = {name: value for name, value in optional.items() if value is not None}
    for problem in importlib.import_module("unmask.problems").make_problems(seed, n, split=split, **given):
        print(json.dumps({"question": problem["question"], "answer": problem["answer"]}, ensure_ascii=False))
