"""The run that made the model that ships: its record, its stages, what validation saw at the end of each."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence

from _docs import results
from _docs.results import Result, single
from _docs.text import markdown, sampling, table

RUN = "unmask-mini/run"
MOSTLY_MASKED = (0.5, 0.9, 1.0)


def shipped() -> str:
    """The model that ships, in one table."""
    about, files = single(RUN), results.ROOT / "src/unmask/assets/unmask-mini"
    model = about["model"]
    recommended = json.loads((files / "generation_config.json").read_text())["unmask"]
    rows = {
        "parameters": f"{about['parameters'] / 1e6:.2f} M",
        "weights": f"{(files / 'model.safetensors').stat().st_size / 1e6:.0f} MB, bf16",
        "layers, width, heads": f"{model['n_layers']}, {model['d_model']}, {model['n_heads']}",
        "vocabulary": model["vocab_size"],
        "longest canvas": f"{model['max_sequence_length']} tokens",
        "trained on": f"{about['requests']:,} generated requests, {about['steps']:,} steps",
        "trained in": f"{sum(about['stage_seconds'].values()) / 60:.0f} minutes on one {about['gpu']}",
        "recommends": sampling(dict(sorted(recommended.items()))),
    }
    return markdown(["unmask-mini", ""], list(rows.items()))


def stages() -> str:
    """What each stage of the training run was."""
    about = single(RUN)
    return table(
        about["config"]["stages"],
        {
            "stage": "{name}",
            "steps": "{steps}",
            "batch": "{batch_size}",
            "positions a row": _positions,
            "masks": lambda stage: ", ".join(f"{share:.0%} {kind}" for kind, share in stage["masks"].items()),
            "problems a request": lambda stage: _counts(list(stage["requests"])),
            "peak rate": "{lr_scale}",
            "seconds": lambda stage: f"{about['stage_seconds'][stage['name']]:.0f}",
        },
    )


def _positions(stage: Result) -> str:
    short = f"; {stage['short_share']:.0%} of rows {stage['short_length']}" if stage["short_share"] else ""
    return f"{stage['length']}{short}"


def _counts(requests: Sequence[str]) -> str:
    return f"{min(requests)} to {max(requests)}" if len(requests) > 1 else requests[0]


def calibration() -> str:
    """End-of-text at the end of each stage, where most of the canvas is masked."""
    shares = ("accuracy", "eos_probability", "eos_frequency", "eos_sure", "eos_overconfident")
    return table(
        [
            row | {name: float(row[name]) for name in shares}
            for row in _last_validations()
            if float(row["t"]) in MOSTLY_MASKED
        ],
        {
            "after stage": "{stage}",
            "masks": "{masks}",
            "mask rate": "{t}",
            "right": "{accuracy:.2%}",
            "p(end)": "{eos_probability:.2%}",
            "was end": "{eos_frequency:.2%}",
            "surely end": "{eos_sure:.2%}",
            "of these wrong": "{eos_overconfident:.2%}",
        },
    )


def _last_validations() -> list[Result]:
    """The averaged weights' records at the last step of each stage, each once."""
    with (results.RESULTS / "unmask-mini" / "validation.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["weights"] == "ema"]
    last = {row["stage"]: row["step"] for row in rows}
    unique = {(row["stage"], row["masks"], row["t"]): row for row in rows if row["step"] == last[row["stage"]]}
    return list(unique.values())
