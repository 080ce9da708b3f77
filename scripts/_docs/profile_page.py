"""What docs/profile.md shows of the result files of `unmask profile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _docs import results
from _docs.results import Result, made_with, of_each, single
from _docs.text import if_measured, markdown, optional, table
from unmask.bench.profile_plot import TOP, draw, rule_name, select

FOUND = 0.9
"""Of the rows that values choose, what is called found."""


def draw_picture(result: Result) -> str:
    """Drawn anew beside its numbers; its name."""
    draw(result, results.ROOT / "docs" / _picture(result))
    return _picture(result)


def _picture(result: Result) -> str:
    """In docs/."""
    return "_".join(filter(None, ["results/profile", result["variant"]])) + ".svg"


def _about(result: Result) -> str:
    about = f"{result['model']} in {result['dtype']}, {result['num_requests']} requests of {result['prompts']}, "
    return f"{about}{result['max_tokens']} answer positions; {made_with(result)}"


of_networks = of_each("profile", _about)


def of_rules(show: Callable[[Result, str], str]) -> Callable[[], str]:
    """The same of each way of decoding, on each profiled network."""
    return of_networks(
        lambda result: "\n\n".join(f"{_title(result, rule)}:\n\n{show(result, rule)}" for rule in result["rules"])
    )


def _title(result: Result, rule: str) -> str:
    """As a table's heading."""
    return rule_name(result, rule).capitalize()


def _layers(result: Result) -> range:
    """All of the network's."""
    return range(result["network"]["num_layers"])


# --- tables of one rule


@of_rules
def drift(result: Result, rule: str) -> str:
    """How far the values of each group of rows drift, and how many drift too far."""
    above = f"{result['above']:g}"
    rows = {(row["identifier"], row["group"], row["layer"]): row for row in select(result, rule, part="drift")}
    lines = []
    for layer in _layers(result):
        if (answer := rows.get(("value", "answer", layer))) is None:
            continue
        line = [layer, f"{answer['mean']:.4f}", *(f"{answer['quantile'][share]:.1e}" for share in ("0.5", "0.9"))]
        values = [rows.get(("value", group, layer)) for group in ("answer", "undecided", "prompt")]
        others = [rows.get((name, "answer", layer)) for name in ("proxy", "input", "attention")]
        shares = [row["above"][above] if row else None for row in (*values, *others)]
        shares.insert(3, answer["most_above"])
        lines.append([*line, *(optional(share, ".1%") for share in shares)])
    head = ["layer", "mean drift", "half of the rows below", "9 in 10 below"]
    head += [f"answer rows over {above}", "undecided rows", "prompt rows", "answer rows, 9 passes in 10"]
    return markdown([*head, "by proxies", "by inputs", "by attention outputs"], lines)


@of_rules
def attention(result: Result, rule: str) -> str:
    """The attention that few decided positions hold: own picks, tracked ones, random ones."""
    rows = {(row["top"], row["layer"]): row for row in select(result, rule, part="attention")}
    tops = sorted({top for top, _ in rows})
    lines = []
    for layer in _layers(result):
        cells = [_picked(rows.get((top, layer))) for top in tops]
        every = next((rows[top, layer]["all_decided"] for top in tops if (top, layer) in rows), None)
        lines.append([layer, *cells, optional(every, ".0%")])
    return markdown(["layer", *(f"{top} positions" for top in tops), "all decided"], lines)


def _picked(row: dict[str, Any] | None) -> str:
    return " / ".join(optional(row[name], ".0%") for name in ("own", "tracked", "random")) if row else "-"


@of_rules
def proxies(result: Result, rule: str) -> str:
    """How many of the rows that values choose proxies choose, too, and what share of the drift theirs have."""
    rows = {(row["rank"], row["layer"]): row for row in select(result, rule, part="agreement")}
    ranks = result["ranks"]
    lines = [
        [
            layer,
            *(_agreed(rows.get((rank, layer))) for rank in ranks),
            optional(rows.get((ranks[-1], layer), {}).get("chance"), ".0%"),
        ]
        for layer in _layers(result)[1:]
    ]
    return markdown(["layer", *(f"rank {rank}" for rank in ranks), "by chance"], lines)


def _agreed(row: dict[str, Any] | None) -> str:
    return f"{optional(row['overlap'], '.0%')} ({optional(row['covered'], '.0%')})" if row else "-"


# --- of all rules


@of_networks
def budgets(result: Result) -> str:
    """The curve through the shares of the drift tables, by what was compared."""
    return table(
        result["fits"],
        {
            "decoding": lambda fitted: rule_name(result, fitted["rule"]),
            "drift of": "{identifier}",
            "rows of": lambda fitted: "the mean pass" if fitted["of"] == "mean" else "9 passes in 10",
            **{name: f"{{{name}:.4g}}" for name in ("mu", "rho_s", "rho_p", "rho_e")},
            "all layers": if_measured("mean_share", ".1%"),
            "off": "{residual:.2f}",
            "off if flat": "{residual_flat:.2f}",
        },
    )


def code() -> str:
    """A method with a budget as measured last: of values, for most passes."""
    result, wanted = single("profile"), ("value", "most")
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


@of_networks
def seen(result: Result) -> str:
    """What the papers saw, in the numbers of this run, and all of it as a picture. Links start at the repository's
    root."""
    lines = [f"- {line}" for rule in result["rules"] for line in _seen(result, rule)]
    return "\n".join([*lines, "", f"![Drift, attention and proxies by layer](docs/{_picture(result)})"])


def _seen(result: Result, rule: str) -> Iterator[str]:
    name, last = _title(result, rule), len(_layers(result)) - 1
    fits = {(each["rule"], each["identifier"], each["of"]): each for each in result["fits"]}
    if (fitted := fits.get((rule, "value", "mean"))) is not None:
        share = fitted["share"]
        most = max(_layers(result), key=share.__getitem__)
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
