"""What is measured beside what: caches beside none on the same problems, our loop beside the public Fast-dLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
Table = tuple[list[str], list[list[Any]]]

__all__ = ["compared", "fast_dllm", "whole_sets"]


def compared(result: Result, name_of: Callable[[Result], str], said: Callable[[Any], str]) -> Table:
    """Cells beside the one that decides in the same places by the same rule and keeps nothing."""
    rows = {row["cell"]: row for row in result["rows"] if "refused" not in row}
    head = ["method", "its requests say", "accuracy", "without a cache", "difference, points", "95%", "rows", "passes"]
    lines = []
    for row in rows.values():
        found = row["to_no_cache"]
        if found is None or found["of"] not in rows:
            continue
        other = rows[found["of"]]
        low, high = (100 * found[name] for name in ("low", "high"))
        lines.append(
            [
                name_of(row),
                said(row["said"]),
                f"{row['accuracy']:.1%}",
                f"{other['accuracy']:.1%}",
                f"{100 * found['difference']:+.2f}",
                f"{low:+.2f} to {high:+.2f}",
                f"{row['num_rows'] / other['num_rows']:.1%}",
                f"{row['num_passes'] / other['num_passes']:.2f}",
            ]
        )
    return head, lines


def whole_sets(rows: list[Result]) -> Table:
    """Accuracy on many problems, setting by setting."""
    head = ["threshold", "blocks", "right", "tokens a pass"]
    names = {0: "whole canvas"}
    return head, [
        [
            row["threshold"],
            names.get(row["block_length"], f"of {row['block_length']}"),
            f"{row['num_correct']} of {row['num_problems']} ({row['accuracy']:.2%})",
            f"{row['tokens_per_pass']:.1f}",
        ]
        for row in rows
    ]


def fast_dllm(theirs: Result, ours: dict[str, Result]) -> Table:
    """The public code's runs, then our one request by variant of its result file; how many times its dual cache."""
    head = [
        "what runs",
        "tokens a pass",
        "ms a pass",
        "of a whole canvas",
        "of a block",
        "tokens/s",
        "times their dual",
    ]
    dual = max((r for r in theirs["rows"] if r["cache"] == "dual"), key=lambda row: row["tokens_per_pass"])
    lines = []
    for row in theirs["rows"]:
        cells = [
            f"Fast-dLLM, {'no' if row['cache'] == 'none' else row['cache']} cache",
            f"{row['tokens_per_pass']:.2f}",
        ]
        cells += [_ms(row[name]) for name in ("ms_a_pass", "ms_full", "ms_cached")]
        same = row["tokens_per_pass"] == dual["tokens_per_pass"]
        times = f"{row['tokens_per_second'] / dual['tokens_per_second']:.1f}" if same else "-"
        lines.append([*cells, f"{row['tokens_per_second']:.1f}", times])
    for variant, result in ours.items():
        for row in (each for each in result["rows"] if each["method"] == "flash-cache"):
            name = "unmask, `flash-cache`" + (f", {variant.replace('_', ', ')}" if variant else "")
            # A pass of ours costs the same at any number of tokens: both are set to what theirs commits.
            rate = dual["tokens_per_pass"] / row["ms_per_pass"] * 1e3
            cells = [name, f"{dual['tokens_per_pass']:.2f}", _ms(row["ms_per_pass"]), "-", "-", f"{rate:.1f}"]
            lines.append([*cells, f"{rate / dual['tokens_per_second']:.1f}"])
    return head, lines


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
