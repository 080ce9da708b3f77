"""Whole steps on a GPU: one captured step taken apart, and steps over seats and rows."""

from __future__ import annotations

import re

from _docs.results import Result, Show, ceilings, made_with, of_each, single
from _docs.text import Columns, grouped, if_measured, markdown, table

GRID = re.compile(r"\d+ rows")
STEP_TIMES = of_each("step_times", ceilings)


# --- a captured step, from `scripts/bench step`


def times() -> str:
    """Milliseconds and kernels of one captured step: eager parts, then compiled, if they were measured."""
    result = single("step")
    ways = (False, True) if _compiles({"rows": result["times"]}) else (False,)
    rows = []
    for key, pair in grouped(result["times"], "kind", "seats", "needs").items():
        both = {way: ["-", "-"] for way in ways} | {row["compiled"]: _times(row) for row in pair}
        rows.append([*key, *(cell for way in ways for cell in both[way])])
    head = ["step", "seats", "rules in use", "whole", "its rules", "compiled: whole", "its rules"]
    head = head[: 3 + 2 * len(ways)]
    return f"{markdown(head, rows)}\n\nMilliseconds, kernels in brackets; {made_with(result)}"


def _times(row: Result) -> list[str]:
    return [f"{row[f'us_{part}'] / 1000:.2f} ({row[f'kernels_{part}']})" for part in ("whole", "rules")]


def checks() -> str:
    """What was compared with eager execution, and whether it was equal."""
    result = single("step")
    rows = [
        [
            kind,
            dtype,
            "yes" if compiled else "no",
            *(sum(row[name] for row in checks) for name in ("num_steps", "drafts_accepted")),
            "yes" if all(row["equal"] for row in checks) else "NO",
        ]
        for (kind, dtype, compiled), checks in grouped(result["checks"], "kind", "dtype", "compiled").items()
    ]
    head = ["step", "dtype", "compiled", "steps compared", "drafts accepted", "equal"]
    return f"{markdown(head, rows)}\n\n{made_with(result)}"


# --- over seats and rows, from `unmask bench step`


@STEP_TIMES
def grid(result: Result) -> str:
    """Milliseconds of a captured step over seats and rows, and how many floors that is."""
    times = {(row["seats"], row["rows"]): row for row in on_grid(result)}
    if not times:
        return ""
    seats, widths = (sorted(set(each)) for each in zip(*times))
    head = ["seats", *(f"{rows} rows" for rows in widths)]

    def by_seats(cell: Show) -> str:
        lines = [[times.get((num, rows)) for rows in widths] for num in seats]
        return markdown(head, [[num, *(cell(row) if row else "-" for row in line)] for num, line in zip(seats, lines)])

    about = "What of the floor of products, attention and head one after the other that is:"
    in_turn = by_seats(lambda row: _of_floor_in_turn(row, result))
    return f"![Steps over seats]({picture(result)})\n\n{by_seats(_over_floor)}\n\n{about}\n\n{in_turn}"


def on_grid(result: Result) -> list[Result]:
    """The steps of a number of rows, where they were timed; none of a run that compiles some and is listed whole."""
    if _compiles(result):
        return []
    return [row for row in result["rows"] if GRID.fullmatch(row["kind"]) and "ms" in row]


def _compiles(result: Result) -> bool:
    return any(row["compiled"] for row in result["rows"])


def picture(result: Result) -> str:
    """A file for each shape and way of keeping its weights."""
    return "_".join(["step", result["shape"], *filter(None, [result.get("quantization")])]) + ".svg"


def _over_floor(row: Result) -> str:
    return f"{row['ms']:.2f} ({row['over_floor']:.2f}){_as_asked(row)}"


def _as_asked(row: Result) -> str:
    return "" if row["ok"] else " NOT AS ASKED"


def _of_floor_in_turn(row: Result, result: Result) -> str:
    """Share of a step's time that its parts cannot do without, each bound by what binds it."""
    from unmask.bench.floor import Ceilings, seconds_in_turn, step_parts
    from unmask.bench.shapes import SHAPES

    counts = {name: row[name] for name in ("seats", "rows", "scored", "keys")}
    weight_size = 1 if result.get("quantization") == "fp8" else 2
    parts = step_parts(SHAPES[result["shape"]], **counts, weight_size=weight_size)
    return f"{1e5 * seconds_in_turn(parts, Ceilings(**result['ceilings'])) / row['ms']:.0f}%"


@STEP_TIMES
def kinds(result: Result) -> str:
    """The steps of named methods: milliseconds, floor, rows."""
    whole = _compiles(result)
    rows = [row for row in result["rows"] if "ms" in row and (whole or not GRID.fullmatch(row["kind"]))]
    columns: Columns = {
        "step": "{kind}",
        "seats": "{seats}",
        "rows a seat": lambda row: row["rows"] + row["second_rows"],
        "compiled": lambda row: "yes" if row["compiled"] else "no",
        "ms": "{ms:.2f}",
        "floor, ms": "{floor_ms:.2f}",
        "times the floor": lambda row: f"{row['over_floor']:.2f}{_as_asked(row)}",
    }
    return table(rows, columns) if rows else ""


@STEP_TIMES
def memory(result: Result) -> str:
    """Gigabytes of weights, pool, and everything at its highest."""
    columns: Columns = {
        "seats": "{seats}",
        "canvas": "{keys}",
        "weights, GB": if_measured("weights_GB", ".1f"),
        "K/V, GB": if_measured("pool_GB", ".1f"),
        "most allocated, GB": if_measured("allocated_GB", ".1f"),
        "most reserved, GB": if_measured("reserved_GB", ".1f"),
    }
    rows = result.get("memory")
    return table(rows, columns) if rows else ""
