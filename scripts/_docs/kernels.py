"""The operations of the GPU, each alone: beside its floor and what it is compared with, and against fp64."""

from __future__ import annotations

from _docs.results import Result, ceilings, single
from _docs.text import grouped, if_measured, markdown, table

PICTURE = "kernels.svg"
FACTS = ("kind", "op", "ok", "errors", "bytes", "flops", "bound_by", "floor_us", "us", "over_floor", "extra_MB", "runs")
LISTS = ("others_us", "parts_us", "speedup", "tile", "case", "failed", "to_exact")
WORST = "worst row of "
"""How errors of single rows begin, as in `unmask.bench.checking`."""


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
    without = f" Without {result['without']}." if "without" in result else ""
    return f"![Time over floor]({PICTURE})\n\n{text}\n\n{ceilings(result)}{without}"


def _others(row: Result) -> str:
    return "; ".join(f"{name} {us:.1f}" for name, us in {**row["others_us"], **row["parts_us"]}.items()) or "-"


def _faster(row: Result) -> str:
    """What is the library's own has nothing to be faster than."""
    if not row["ok"]:
        return "WRONG"
    faster = "; ".join(f"{value:.2f} ({name})" for name, value in row["speedup"].items())
    return faster or str(row.get("runs", "-"))


def checks() -> str:
    """What was compared with fp64, by operation: whole tensors and, where it was looked at, the worst row."""
    result = single("kernels")
    by_op = {op: rows for (op,), rows in grouped(result["rows"], "op").items()}
    of_rows = any(_errors(rows, of_rows=True) for rows in by_op.values())
    head = ["operation", "comparisons", "largest relative error", *(["of one row"] if of_rows else []), "all right"]
    lines = [
        [
            f"`{op}`",
            len(rows),
            *(_worst(rows, of_rows=each) for each in ((False, True) if of_rows else (False,))),
            "yes" if all(row["ok"] for row in rows) else "NO",
        ]
        for op, rows in by_op.items()
    ]
    return f"{markdown(head, lines)}\n\n{ceilings(result)}"


def _worst(rows: list[Result], *, of_rows: bool) -> str:
    errors = _errors(rows, of_rows=of_rows)
    return f"{max(errors):.1e}" if errors else "-"


def _errors(rows: list[Result], *, of_rows: bool) -> list[float]:
    told = [each for row in rows for each in row.get("errors", {}).items()]
    return [value for name, value in told if name.startswith(WORST) == of_rows]
