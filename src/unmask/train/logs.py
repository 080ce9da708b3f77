"""What a run writes for people: CSV lines, a curve, run.json and a progress line."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unmask._version import __version__
from unmask.errors import EngineError, MissingDependencyError

TRAIN_FIELDS = ("stage", "step", "seconds", "loss", "grad_norm", "lr", "tokens_per_second", "data_wait", "progress")
PLAIN_EVERY = 10.0
"""Seconds between progress lines that go to no terminal."""


def append_csv(path: Path, fields: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Add lines; the header comes with the first."""
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields)
        if fresh:
            writer.writeheader()
        writer.writerows({k: _short(v) for k, v in row.items()} for row in rows)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def trim_csv(path: Path, last_step: int) -> None:
    """Drop the lines after ``last_step``, which a resumed run writes again."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        fields, rows = list(reader.fieldnames or ()), [r for r in reader if int(r["step"]) <= last_step]
    path.unlink()
    append_csv(path, fields, rows)


def check_finite(step: int, losses: Sequence[float], norms: Sequence[float]) -> None:
    """The values of the steps up to ``step``, the last. A loss or norm that is no number ends the run.

    Values are read some steps late, so the weights may be spoiled by then; saved states are not: this runs before
    every save.

    Raises:
        EngineError: names the first such step.
    """
    for i, (loss, norm) in enumerate(zip(losses, norms)):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            bad = step - len(losses) + 1 + i
            raise EngineError(
                f"training diverged at step {bad}: loss {loss}, gradient norm {norm}. The saved state is from before; "
                "resume with a lower muon_lr or adam_lr, or a smaller grad_clip"
            )


def plot_loss(log: Path, to: Path) -> None:
    """Draw train_log.csv.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"drawing {to.name} needs matplotlib: pip install 'unmask[train]'; the numbers are in {log}"
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for stage, (steps, losses) in _curves(log).items():
        axes.plot(steps, losses, label=stage, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats a position)", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(to, dpi=120)


def _curves(log: Path) -> dict[str, tuple[list[int], list[float]]]:
    out: dict[str, tuple[list[int], list[float]]] = {}
    with log.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            steps, losses = out.setdefault(row["stage"], ([], []))
            steps.append(int(row["step"]))
            losses.append(float(row["loss"]))
    return out


def write_run(path: Path, facts: Mapping[str, Any], device: torch.device) -> None:
    """run.json: the facts given, and where and with what the run was made."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "unmask": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "gpu": gpu,
        "commit": _commit(),
    }
    path.write_text(json.dumps({**facts, **about}, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _commit() -> str | None:
    """The source's git commit, when it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


class Progress:
    """A bar on a terminal; a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None
        self.said = -math.inf
        if sys.stdout.isatty():
            from rich.progress import Progress as Bar

            self.bar = Bar()
            self.bar.start()

    def stage(self, name: str) -> None:
        """A new stage begins."""
        self.name, self.said = name, -math.inf
        if self.bar is not None:
            self.task = self.bar.add_task(name, total=1.0)

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a line of train_log.csv."""
        layout = "{stage} step {step}  loss {loss:.4f}  norm {grad_norm:.3f}  {tokens_per_second:,.0f} tokens/s"
        text = layout.format(**row)
        if self.bar is not None:
            self.bar.update(self.task, completed=row["progress"], description=text)
        elif time.monotonic() - self.said >= PLAIN_EVERY:
            self.said = time.monotonic()
            print(f"{text}  {100 * row['progress']:.0f}% in {row['seconds']:.0f} s", flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Give the terminal back."""
        if self.bar is not None:
            self.bar.stop()


def as_row(record: Any) -> dict[str, Any]:
    """A record's fields, in order."""
    return dataclasses.asdict(record)
