"""Pictures of results, where matplotlib is installed. Equal results give equal files."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from _docs import kernels, method_results, profile_page, results, steps
from _docs.results import Result, found, single

LEAST_FLOOR_US = 0.1


def draw() -> list[str]:
    """Write the pictures whose results and whose library are there; their names."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unmask"
    from matplotlib import pyplot

    drawn: list[str] = []
    for each in (_steps, _kernels, partial(_methods, "short"), partial(_methods, "long"), _profiles):
        with contextlib.suppress(FileNotFoundError):
            drawn += each(pyplot)
    return drawn


def _save(plot: Any, figure: Any, name: str) -> str:
    figure.savefig(results.ROOT / "docs" / name, bbox_inches="tight", metadata={"Date": None})
    plot.close(figure)
    return name


def _steps(plot: Any) -> list[str]:
    """Steps of a seat a second over seats, beside what the floor would allow."""
    return [_step(plot, result, grid) for result in found("step_times") if (grid := steps.on_grid(result))]


def _step(plot: Any, result: Result, grid: list[Result]) -> str:
    figure, axes = plot.subplots(figsize=(7, 4.5))
    for number, width in enumerate(sorted({row["rows"] for row in grid})):
        line = sorted((row for row in grid if row["rows"] == width), key=lambda row: row["seats"])
        seats, colour = [row["seats"] for row in line], f"C{number}"
        axes.plot(seats, [1e3 * row["seats"] / row["ms"] for row in line], "o-", color=colour, label=f"{width} rows")
        axes.plot(seats, [1e3 * row["seats"] / row["floor_ms"] for row in line], ":", color=colour)
    axes.set(xscale="log", yscale="log", xlabel="seats", ylabel="steps of a seat a second (dotted: the floor)")
    ticks = sorted({row["seats"] for row in grid})
    axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.set_title(f"{result['shape']}, {result['prompt'] + result['answer']} keys, {result['environment']['device']}")
    axes.legend()
    return _save(plot, figure, steps.picture(result))


def _kernels(plot: Any) -> list[str]:
    """How many floors every operation takes that moves enough for a floor to say something: a launch takes 1.6 us."""
    result = single("kernels")
    rows = [row for row in kernels.timed(result)[::-1] if row["floor_us"] >= LEAST_FLOOR_US]
    figure, axes = plot.subplots(figsize=(8, 0.22 * len(rows) + 1))
    ops = sorted({row["op"] for row in rows})
    colours = [f"C{ops.index(row['op'])}" for row in rows]
    axes.barh(range(len(rows)), [row["over_floor"] for row in rows], color=colours)
    axes.set_yticks(range(len(rows)), [f"{row['op']}: {kernels.size_of(row)}" for row in rows], fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel=f"time over floor, {result['environment']['device']}")
    return [_save(plot, figure, kernels.PICTURE)]


def _methods(setting: str, plot: Any) -> list[str]:
    """Every method over thresholds: accuracy over tokens a pass, and over rows a token. Without those that the weights
    were not made for, which lie far below."""
    result = single(f"methods_{setting}")
    rows = {row["cell"]: row for row in result["rows"]}
    figure, sides = plot.subplots(1, 2, figsize=(12, 5), sharey=True)
    lines = [curve for curve in result["curves"] if curve["over"] == "threshold"]
    lines = [curve for curve in lines if all(rows[cell]["attention_as_trained"] for cell in curve["cells"])]
    for number, curve in enumerate(lines):
        points = [rows[cell] for cell in curve["cells"]]
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "marker": "o"}
        words = [method_results.named(points[0]).replace("`", ""), method_results.said(curve["held"])]
        for axes, name in zip(sides, ("tokens_per_pass", "rows_per_token")):
            xy = [(row[name], 100 * row["accuracy"]) for row in points]
            axes.plot(*zip(*xy), label=", ".join(filter(None, words)), markersize=3, linewidth=1, **style)
    sides[0].set(xlabel="tokens a pass", ylabel="accuracy, %")
    sides[1].set(xlabel="rows a token", xscale="log")
    low, high = sides[1].get_xlim()
    ticks = [tick for tick in (5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high]
    sides[1].set_xticks(ticks, [str(tick) for tick in ticks])
    sides[1].set_xticks([], minor=True)
    if lines:
        sides[1].legend(fontsize=6, loc="lower right")
    figure.suptitle(f"{result['num_problems']} problems, over thresholds, {result['environment']['device']}")
    return [_save(plot, figure, method_results.picture(setting))]


def _profiles(_: Any) -> list[str]:
    return [profile_page.draw_picture(result) for result in found("profile")]
