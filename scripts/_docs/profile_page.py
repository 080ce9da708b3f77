"""What docs/profile.md shows of the result files of `unmask profile`. Tables are a head and its rows, by rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unmask.bench.profile_plot import TOP, draw, rule_name, select

Result = dict[str, Any]
Table = tuple[list[str], list[list[Any]]]
FOUND = 0.9
"""Of the rows that values choose, what is called found."""

__all__ = ["attention", "budgets", "code", "draw_picture", "drift", "proxies", "seen", "title"]


def file_of(variant: str) -> str:
    """The picture of a result file, in docs/."""
    return "_".join(filter(None, ["results/profile", variant])) + ".svg"


def draw_picture(variant: str, result: Result, folder: Path) -> str:
    """Drawn anew beside its numbers; its name."""
    draw(result, folder / file_of(variant))
    return file_of(variant)


def title(result: Result, rule: str) -> str:
    """As a table's heading."""
    return rule_name(result, rule).capitalize()


def layers(result: Result) -> range:
    """All of the network's."""
    return range(result["network"]["num_layers"])


def percent(value: float | None, form: str = ".1%") -> str:
    """A dash for what was not measured."""
    return "-" if value is None else f"{value:{form}}"


# --- tables of one rule


def drift(result: Result, rule: str) -> Table:
    """How far the values of each group of rows drift, and how many drift too far."""
    above = f"{result['above']:g}"
    rows = {(row["identifier"], row["group"], row["layer"]): row for row in select(result, rule, part="drift")}
    lines = []
    for layer in layers(result):
        if (answer := rows.get(("value", "answer", layer))) is None:
            continue
        line = [layer, f"{answer['mean']:.4f}", *(f"{answer['quantile'][share]:.1e}" for share in ("0.5", "0.9"))]
        values = [rows.get(("value", group, layer)) for group in ("answer", "undecided", "prompt")]
        others = [rows.get((name, "answer", layer)) for name in ("proxy", "input", "attention")]
        shares = [row["above"][above] if row else None for row in (*values, *others)]
        shares.insert(3, answer["most_above"])
        lines.append([*line, *map(percent, shares)])
    head = ["layer", "mean drift", "half of the rows below", "9 in 10 below"]
    head += [f"answer rows over {above}", "undecided rows", "prompt rows", "answer rows, 9 passes in 10"]
    return [*head, "by proxies", "by inputs", "by attention outputs"], lines


def attention(result: Result, rule: str) -> Table:
    """The attention that few decided positions hold: own picks, tracked ones, random ones."""
    rows = {(row["top"], row["layer"]): row for row in select(result, rule, part="attention")}
    tops = sorted({top for top, _ in rows})
    lines = []
    for layer in layers(result):
        cells = [_picked(rows.get((top, layer))) for top in tops]
        every = next((rows[top, layer]["all_decided"] for top in tops if (top, layer) in rows), None)
        lines.append([layer, *cells, percent(every, ".0%")])
    return ["layer", *(f"{top} positions" for top in tops), "all decided"], lines


def _picked(row: dict[str, Any] | None) -> str:
    return " / ".join(percent(row[name], ".0%") for name in ("own", "tracked", "random")) if row else "-"


def proxies(result: Result, rule: str) -> Table:
    """How many of the rows that values choose proxies choose, too, and what share of the drift theirs have."""
    rows = {(row["rank"], row["layer"]): row for row in select(result, rule, part="agreement")}
    ranks = result["ranks"]
    lines = [
        [
            layer,
            *(_agreed(rows.get((rank, layer))) for rank in ranks),
            percent(rows.get((ranks[-1], layer), {}).get("chance"), ".0%"),
        ]
        for layer in layers(result)[1:]
    ]
    return ["layer", *(f"rank {rank}" for rank in ranks), "by chance"], lines


def _agreed(row: dict[str, Any] | None) -> str:
    return f"{percent(row['overlap'], '.0%')} ({percent(row['covered'], '.0%')})" if row else "-"


# --- of all rules


def budgets(result: Result) -> Table:
    """The curve through the shares of the drift tables, by what was compared."""
    head = ["decoding", "drift of", "rows of", "mu", "rho_s", "rho_p", "rho_e", "all layers", "off", "off if flat"]
    lines = [
        [
            rule_name(result, fitted["rule"]),
            fitted["identifier"],
            "the mean pass" if fitted["of"] == "mean" else "9 passes in 10",
            *(f"{fitted[name]:.4g}" for name in ("mu", "rho_s", "rho_p", "rho_e")),
            percent(fitted["mean_share"]),
            f"{fitted['residual']:.2f}",
            f"{fitted['residual_flat']:.2f}",
        ]
        for fitted in result["fits"]
    ]
    return head, lines


def code(result: Result) -> str:
    """A method with a budget as measured last: of values, for most passes."""
    wanted = ("value", "most")
    curve = next((each for each in result["fits"] if (each["identifier"], each["of"]) == wanted), result["fits"][0])
    sampling = '{"threshold": 2.0' if curve["rule"] == "one" else f'{{"threshold": {result["threshold"]:g}'
    lines = [
        "from unmask import Method",
        "",
        f"options = {curve['paste']}",
        f'sampling = {sampling}, "refresh_interval": 50, "answer_interval": 7}}',
        'method = Method(name="measured", title="As measured", policy="drift", options=options, sampling=sampling)',
    ]
    return "\n".join(["```python", *lines, "```"])


def seen(variant: str, result: Result) -> str:
    """What the papers saw, in the numbers of this run, and all of it as a picture. Links start at the repository's
    root."""
    lines = [f"- {line}" for rule in result["rules"] for line in _seen(result, rule)]
    return "\n".join([*lines, "", f"![Drift, attention and proxies by layer](docs/{file_of(variant)})"])


def _seen(result: Result, rule: str) -> Iterator[str]:
    name, last = title(result, rule), len(layers(result)) - 1
    fits = {(each["rule"], each["identifier"], each["of"]): each for each in result["fits"]}
    if (fitted := fits.get((rule, "value", "mean"))) is not None:
        share = fitted["share"]
        most = max(layers(result), key=share.__getitem__)
        yield (
            f"{name}: values drift most in layer {most} of 0 to {last}, where {share[most]:.1%} of the answer's rows "
            f"are over {result['above']:g}; in layer 0 {share[0]:.1%} are, in the last one {share[-1]:.1%}. The curve "
            f"is off by {fitted['residual']:.2f} in the logarithm, one share for all layers by "
            f"{fitted['residual_flat']:.2f}."
        )
    if looks := select(result, rule, part="attention", top=TOP):
        own, tracked, others, every = (_mean(looks, each) for each in ("own", "tracked", "random", "all_decided"))
        yield (
            f"{name}: the {TOP} of {looks[0]['num_decided']:.0f} decided positions that a layer looks at most hold "
            f"{own:.0%} of the window's attention, mean over layers, where all decided ones hold {every:.0%}; those "
            f"that Flash-Cache would track hold {tracked:.0%}, random ones {others:.0%}."
        )
    if agreement := select(result, rule, part="agreement"):
        least = {rank: min(row["overlap"] for row in agreement if row["rank"] == rank) for rank in result["ranks"]}
        enough = next((rank for rank in result["ranks"] if least[rank] >= FOUND), None)
        if enough is not None:
            yield (
                f"{name}: from rank {enough} of {result['ranks'][-1]} on, proxies find at least {FOUND:.0%} of the "
                f"rows that values choose, in every layer behind the first; by chance they would find "
                f"{_mean(agreement, 'chance'):.0%}."
            )


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))
