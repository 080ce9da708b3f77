"""How many word problems the model that ships gets right: by threshold and blocks, in 8 bits, on many problems, and
beside the autoregressive model of its size."""

from __future__ import annotations

import contextlib

from _docs.results import Result, in_requests, load_script, made_with, problems, single
from _docs.text import grouped, markdown, table

MISSING = "nan% (nan)"


def thresholds(name: str) -> str:
    """Thresholds by blocks, as `scripts/accuracy --table` prints it; a cell that is not measured yet is a dash, and a
    threshold of which none is has no line."""
    script, rows = load_script("accuracy"), single(name)["rows"]
    have, nan = {(row.get("threshold"), row["block_length"]) for row in rows}, float("nan")
    for value in (*script.THRESHOLDS, None):
        for block in script.BLOCKS:
            if (value, block) not in have:
                rows.append({"threshold": value, "block_length": block, "accuracy": nan, "tokens_per_pass": nan})
    text: str = script.table({"rows": rows})
    lines = [line for line in text.splitlines() if line.count(MISSING) < len(script.BLOCKS)]
    return "\n".join(lines).replace(MISSING, "-") + f"\n\n{problems(rows[0])}"


def fp8() -> str:
    """The same problems with the weights as they are and in 8 bits."""
    rows = single("fp8_accuracy")["rows"]
    lines = []
    for (dtype, block, threshold), pair in grouped(rows, "dtype", "block_length", "threshold").items():
        by_weights = {row["quantization"]: _scored(row) for row in pair}
        words = f"{threshold}, blocks of {block}"
        lines.append([dtype, words, *(by_weights.get(quantization, "-") for quantization in (None, "fp8"))])
    about = f"{rows[0]['num_problems']} held-out problems, {rows[0]['max_tokens']} answer positions"
    head = ["computed in", "threshold", "weights as they are", "fp8"]
    return f"{markdown(head, lines)}\n\n{about}; {made_with(rows[0])}"


def _scored(row: Result) -> str:
    return f"{row['accuracy']:.1%} ({row['tokens_per_pass']:.1f})"


def whole_sets() -> str:
    """Accuracy on 10,000 problems, setting by setting."""
    rows = single("accuracy_10000")["rows"]
    text = table(
        rows,
        {
            "threshold": "{threshold}",
            "blocks": lambda row: f"of {row['block_length']}" if row["block_length"] else "whole canvas",
            "right": "{num_correct} of {num_problems} ({accuracy:.2%})",
            "tokens a pass": "{tokens_per_pass:.1f}",
            "measured on": lambda row: made_with(row).rstrip("."),
        },
    )
    return f"{text}\n\n{rows[0]['dtype']}, {rows[0]['max_tokens']} answer positions."


def left_to_right() -> str:
    """The autoregressive model of the same size on the same problems."""
    parts = []
    for name in ("accuracy_ar", "accuracy_ar_long"):
        with contextlib.suppress(FileNotFoundError):
            (row,) = single(name)["rows"]
            parts.append(
                f"{row['num_correct']} of {row['num_problems']} problems{in_requests(row)} ({row['accuracy']:.1%}), "
                f"{row['tokens_per_pass']:.2f} tokens a pass; {made_with(row)}"
            )
    if not parts:
        raise FileNotFoundError("accuracy_ar")
    spent = []
    for name in ("unmask-mini-ar", "unmask-mini"):
        run = single(f"{name}/run")
        seconds = sum(run["stage_seconds"].values())
        spent.append(f"{name} {seconds:.0f} s and {run['requests'] / 1e6:.1f} million rows ({run['gpu']})")
    return "\n\n".join([*parts, f"Trained for: {'; '.join(spent)}."])
