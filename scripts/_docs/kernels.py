"""The operations of the GPU, each alone: beside its floor and what it is compared with, and against fp64."""

from __future__ import annotations

from typing import Any

from _docs.results import Result, ceilings, single
from _docs.text import grouped, if_measured, markdown, table

PICTURE = "kernels.svg"
FACTS = ("kind", "op", "ok", "errors", "bytes", "flops", "bound_by", "floor_us", "us", "over_floor", "extra_MB")
LISTS = ("others_us", "parts_us", "speedup", "tile", "case", "failed")


def size_of(row: Result) -> str:
    """What a row of `bench kernels` was measured at."""
    told = {key: value for key, value in row.items() if key not in FACTS + LISTS}
    return ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in told.items())


def timed(result: Result) -> list[Result]:
    """The rows that are times; the others are comparisons."""
    return [row for row in result["rows"] if row["kind"] == "time"]


def times() -> str:
    """Every timed operation beside its floor and beside what it is compared with."""
    result = single("kernels")
    text = table(
        timed(result),
        {
            "operation": "`{op}`",
            "size": size_of,
            "us": "{us:.1f}",
            "floor, us": "{floor_us:.1f}",
            "of it": lambda row: f"{1 / row['over_floor']:.0%}",
            "bound by": "{bound_by}",
            "others, us": _others,
            "times faster": _faster,
            "more memory, MB": if_measured("extra_MB", ".0f"),
        },
    )
    return f"![Time over floor]({PICTURE})\n\n{text}\n\n{ceilings(result)}"


def _others(row: Result) -> str:
    return "; ".join(f"{name} {us:.1f}" for name, us in {**row["others_us"], **row["parts_us"]}.items()) or "-"


def _faster(row: Result) -> str:
    faster = "; ".join(f"{value:.2f} ({name})" for name, value in row["speedup"].items())
    return faster or ("-" if row["ok"] else "WRONG")


def checks() -> str:
    """What was compared with fp64, by operation."""
    result = single("kernels")
    rows = [
        [f"`{op}`", len(rows), _worst(rows), "yes" if all(row["ok"] for row in rows) else "NO"]
        for (op,), rows in grouped(result["rows"], "op").items()
    ]
    head = ["operation", "comparisons", "largest relative error", "all right"]
    return f"{markdown(head, rows)}\n\n{ceilings(result)}"


def _worst(rows: list[Any]) -> str:
    errors = [value for row in rows for value in row.get("errors", {}).values()]
    return f"{max(errors):.1e}" if errors else "-"
