"""The picture of a profile: budgets, attention and proxies over the layers, a line of panels for each rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unmask.errors import MissingDependencyError

TOP = 32  # decided positions of the middle panel, as in Flash-dLLM's observation
RULES = {"one": "one token a pass", "threshold": "all above {threshold:g}"}
LABELS = {
    "own": "looked at most in the layer",
    "tracked": "as Flash-Cache tracks them",
    "random": "random",
    "all_decided": "all decided",
}


def draw(result: Mapping[str, Any], to: Path) -> None:
    """Write the SVG of a result file's content; equal results give equal files.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"drawing {to.name} needs matplotlib: pip install 'unmask[train]'; its numbers are in the files beside it"
        ) from error
    rules = list(dict.fromkeys(row["rule"] for row in result["rows"]))
    figure = Figure(figsize=(15, 4.2 * max(len(rules), 1)), layout="constrained")
    panels = figure.subplots(max(len(rules), 1), 3, squeeze=False)
    for line, rule in zip(panels, rules):
        _budgets(line[0], result, rule)
        _attention(line[1], result, rule)
        _proxies(line[2], result, rule)
    figure.suptitle(f"{result['model']}, {result['num_requests']} requests, {result['environment']['device']}")
    to.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "unmask"}):
        figure.savefig(to, format="svg", metadata={"Date": None})


def rule_name(result: Mapping[str, Any], rule: str) -> str:
    """How the requests decided."""
    return RULES[rule].format(threshold=result["threshold"])


def select(result: Mapping[str, Any], rule: str, **wanted: Any) -> list[dict[str, Any]]:
    """A rule's rows with these values."""
    wanted["rule"] = rule
    return [row for row in result["rows"] if all(row.get(name) == value for name, value in wanted.items())]


def _budgets(axes: Any, result: Mapping[str, Any], rule: str) -> None:
    """The share of answer rows that drifted too far, and the curve through it (dotted)."""
    for number, fitted in enumerate(each for each in result["fits"] if (each["rule"], each["of"]) == (rule, "mean")):
        colour = f"C{number}"
        layers = range(len(fitted["share"]))
        axes.plot(layers, _percent(fitted["share"]), "o-", color=colour, markersize=3, label=fitted["identifier"])
        axes.plot(layers, _percent(fitted["curve"]), ":", color=colour)
    title = f"{rule_name(result, rule)}: rows that drifted more than {result['above']:g}"
    _finish(axes, title, "layer (dotted: fitted curve)", "% of the answer's rows")


def _attention(axes: Any, result: Mapping[str, Any], rule: str) -> None:
    found = select(result, rule, part="attention", top=TOP)
    for name, label in LABELS.items():
        style = "--" if name in ("random", "all_decided") else "o-"
        axes.plot([row["layer"] for row in found], _percent([row[name] for row in found]), style, label=label)
    _finish(axes, f"attention of the window to {TOP} decided positions", "layer", "% of all attention")
    axes.set_ylim(0, 100)


def _proxies(axes: Any, result: Mapping[str, Any], rule: str) -> None:
    found = select(result, rule, part="agreement")
    for layer in sorted({row["layer"] for row in found}):
        line = [row for row in found if row["layer"] == layer]
        depth = layer / result["network"]["num_layers"]
        colour = (depth, 0.2, 1 - depth)  # blue at the input, red at the output
        axes.plot([row["rank"] for row in line], _percent([row["overlap"] for row in line]), color=colour)
    if found:
        chance = sum(row["chance"] for row in found) / len(found)
        axes.axhline(100 * chance, color="black", linestyle="--", label="by chance")
        axes.set_xscale("log", base=2)
    _finish(axes, "rows that values choose, found by proxies", "rank (blue: first layers, red: last)", "%")
    axes.set_ylim(0, 103)


def _percent(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else 100 * value for value in values]


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
