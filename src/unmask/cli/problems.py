"""`unmask problems`: word problems as JSON lines."""

from __future__ import annotations

import json
from typing import Annotated, Any, Optional

import typer

from unmask.errors import ConfigError
from unmask.problems import make_problems

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
    optional = {"split": split, "min_steps": min_steps, "max_steps": max_steps, "per_request": per_request}
    given: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
    try:
        made = make_problems(seed, n, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for problem in made:
        print(json.dumps({"question": problem["question"], "answer": problem["answer"]}, ensure_ascii=False))
