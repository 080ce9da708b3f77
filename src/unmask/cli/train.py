"""`unmask train`: a model from a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from unmask.cli.options import DeviceOption

Many = Optional[list[str]]  # noqa: UP045


def train(
    config: Annotated[str, typer.Argument(help="A TOML file, or the name of a packaged one.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of checkpoints and logs.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    init: Annotated[Optional[Path], typer.Option("--init", help="Start from the weights in here.")] = None,  # noqa: UP045
    stage: Annotated[Many, typer.Option("--stage", help="Only this stage. May be repeated.")] = None,
    max_seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--max-seconds", min=0, help="Save and stop after this long."),
    ] = None,
    overrides: Annotated[
        Many, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the config. May be repeated.")
    ] = None,
    workers: Annotated[Optional[int], typer.Option("--workers", min=0, help="Processes that make data.")] = None,  # noqa: UP045
    device: DeviceOption = "auto",
) -> None:
    """Train a model."""
    from unmask.train.config import load_config
    from unmask.train.trainer import train as run

    run(
        load_config(config, overrides or []),
        out,
        device=device,
        resume=resume,
        init=init,
        stages=stage or None,
        max_seconds=max_seconds,
        num_workers=workers,
    )
