"""Every method on the same problems: cells of `unmask bench methods`, and the designs of `scripts/one_pass`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _docs.results import Result, load_script, problems, single
from _docs.text import Columns, optional, table
from unmask import METHODS

INTROS = {
    "short": "One problem a request",
    "long": "Several problems a request",
    "paired_one": "Several problems a request, more of them, one token a pass",
    "paired": "Several problems a request, more of them",
    "verify": "One problem a request, more of them",
    "rest": "One problem a request, fewer of them",
}
OPTIONAL = ("paired_one", "paired", "verify", "rest")
DRAWN = ("short", "long")


# --- words for a cell


def named(row: Result) -> str:
    """Its method, and its drafter if that is another one than the method's."""
    with_other = f"{row['method']} + {row['drafter']}" in row["cell"]
    return f"`{row['method']}`" + (f" + {row['drafter']}" if with_other else "")


def said(values: dict[str, Any]) -> str:
    """What a cell's requests say; a threshold above 1 lets a pass commit its best candidate only."""
    one = values.get("threshold", 0) > 1
    words = ["one token a pass"] if one else []
    return ", ".join(words + [f"{name} {value}" for name, value in values.items() if not (one and name == "threshold")])


def _named_with_weights(row: Result) -> str:
    return named(row) + ("" if row["attention_as_trained"] else " (weights not made for it)")


def _difference(found: Result | None) -> str:
    """In points of accuracy, with its interval."""
    if found is None:
        return "-"
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * found[name] for name in ("difference", "low", "high")))


def _made_with(result: Result, name: str) -> str:
    """As for other problems, and how many cells are missing."""
    if not (left := len(result["left_out"])):
        return problems(result)
    file = f"results/methods_{name}.json"
    about = f"{left} of {result['num_cells']} cells, named in [{file}](docs/{file})."
    return f"{problems(result)} Left out for lack of time: {about}"


ASKED: Columns = {"method": named, "its requests say": lambda row: said(row["said"])}
CELL: Columns = {**ASKED, "accuracy": "{accuracy:.1%}"}
WHOLE: Columns = {
    **CELL,
    "method": _named_with_weights,
    "to no cache": lambda row: _difference(row["to_no_cache"]),
    "to one token a pass": lambda row: _difference(row["to_one_a_pass"]),
    "tokens a step": "{tokens_per_step:.2f}",
    "tokens a pass": "{tokens_per_pass:.2f}",
    "rows a token": "{rows_per_token:.1f}",
    "passes": "{passes_per_request:.1f}",
    "cache bytes a position": "{cache_bytes_per_position:.0f}",
}
ON_ITS_PAGE = ("method", "its requests say", "accuracy", "to no cache", "tokens a pass", "rows a token")


# --- all methods


def measured(setting: str) -> str:
    """Accuracy beside passes and rows, cell by cell; then what varies one value only; then what was refused."""
    result = single(f"methods_{setting}")
    rows = [row for row in result["rows"] if "refused" not in row]
    parts = [f"![Accuracy over tokens a pass and rows a token]({picture(setting)})"] if setting in DRAWN else []
    parts += [table([row for row in rows if row["part"] != "curve"], WHOLE), _made_with(result, setting)]
    if ahead := [row for row in rows if row.get("gains")]:
        parts.append(_gains(ahead))
    if result.get("curves"):
        parts.append(_curves(result))
    if refused := [row for row in result["rows"] if "refused" in row]:
        parts.append(table(refused, {**ASKED, "why it is refused": "{refused}"}))
    return "\n\n".join(parts)


def picture(setting: str) -> str:
    return f"methods_{setting}.svg"


def _gains(rows: Sequence[Result]) -> str:
    """Drafters over the same method without one, at the same accuracy and whatever threshold that takes."""
    more: Columns = {
        "more a step": lambda row: optional(row["gains"]["tokens_per_step"], "+.1%"),
        "more a pass": lambda row: optional(row["gains"]["tokens_per_pass"], "+.1%"),
        "more a row": lambda row: optional(row["gains"]["tokens_per_row"], "+.1%"),
    }
    none: Columns = {"to no cache": lambda row: _difference(row["to_no_cache"])}
    text = table(rows, {**CELL, **none, "tokens a step": "{tokens_per_step:.2f}", **more})
    return f"What trying ahead gains at the same accuracy (-: without it no threshold is as good):\n\n{text}"


def _curves(result: Result) -> str:
    rows = {row["cell"]: row for row in result["rows"]}
    return table(
        result["curves"],
        {
            "method": lambda curve: named(rows[curve["cells"][0]]),
            "over": lambda curve: curve["over"].replace("_", " "),
            "held": lambda curve: said(curve["held"]) or "-",
            "value: accuracy (tokens a pass, rows a token)": lambda curve: "; ".join(
                _point(value, rows[cell]) for value, cell in zip(curve["values"], curve["cells"])
            ),
            "AUP": "{aup:.0f}",
        },
    )


def _point(value: Any, row: Result) -> str:
    return f"{str(value).lower()}: {row['accuracy']:.1%} ({row['tokens_per_pass']:.1f}, {row['rows_per_token']:.1f})"


def compared(name: str) -> str:
    """Cells of methods_NAME beside the one that decides in the same places by the same rule and keeps nothing."""
    result = single(f"methods_{name}")
    columns: Columns = {
        **CELL,
        "without a cache": "{other[accuracy]:.1%}",
        "difference, points": lambda row: f"{100 * row['to_no_cache']['difference']:+.2f}",
        "95%": lambda row: "{:+.3f} to {:+.3f}".format(*(100 * row["to_no_cache"][name] for name in ("low", "high"))),
        "rows": lambda row: f"{_share(row, 'num_rows'):.1%}",
        "passes": lambda row: f"{_share(row, 'num_passes'):.2f}",
    }
    return f"{table(_beside_none(result).values(), columns)}\n\n{_made_with(result, name)}"


def compared_curves(name: str) -> str:
    """The same where one value varies, a line for all of its values."""
    result = single(f"methods_{name}")
    rows = _beside_none(result)
    columns: Columns = {
        "method": lambda curve: named(rows[curve["cells"][0]]),
        "over": lambda curve: curve["over"].replace("_", " "),
        "value: points (rows, passes)": lambda curve: "; ".join(
            _against_none(value, rows[cell]) for value, cell in zip(curve["values"], curve["cells"])
        ),
    }
    lines = [curve for curve in result["curves"] if set(curve["cells"]) <= set(rows)]
    return f"{table(lines, columns)}\n\n{_made_with(result, name)}"


def _beside_none(result: Result) -> dict[str, Result]:
    """The cells that have one, by name."""
    rows = {row["cell"]: row for row in result["rows"] if "refused" not in row}
    pairs = [row | {"other": rows.get(row["to_no_cache"]["of"])} for row in rows.values() if row["to_no_cache"]]
    return {row["cell"]: row for row in pairs if row["other"]}


def _share(row: Result, count: str) -> float:
    share: float = row[count] / row["other"][count]
    return share


def _against_none(value: Any, row: Result) -> str:
    points = f"{100 * row['to_no_cache']['difference']:+.1f}"
    return f"{str(value).lower()}: {points} ({_share(row, 'num_rows'):.0%}, {_share(row, 'num_passes'):.2f})"


def gained(name: str) -> str:
    """What drafters of methods_NAME gain at the same accuracy."""
    result = single(f"methods_{name}")
    ahead = [row for row in result["rows"] if row.get("gains")]
    return f"{_gains(ahead)}\n\n{_made_with(result, name)}"


def one_pass(name: str) -> str:
    """What became of drafts, or every design beside the plain rule."""
    result = single(f"one_pass_{name}")
    return "\n".join(load_script("one_pass").table(result)) + f"\n\n{problems(result)}"


# --- those of a page


def of_methods(*names: str) -> str:
    """The same rows of these methods alone."""
    return "\n\n".join(filter(None, (_in_file(name, names) for name in INTROS)))


def _in_file(file: str, names: Sequence[str]) -> str:
    missing = "" if file in OPTIONAL else f"{INTROS[file]}: Not measured yet."
    try:
        result = single(f"methods_{file}")
    except FileNotFoundError:
        return missing
    rows = [row for row in result["rows"] if any(_is_of(row, name) for name in names)]
    if not rows:
        return missing
    text = table(rows, {name: WHOLE[name] for name in ON_ITS_PAGE})
    return f"{INTROS[file]}:\n\n{text}\n\n{_made_with(result, file)}"


def _is_of(row: Result, name: str) -> bool:
    """Whether a measured cell is this method's: by name, or as another one of the same members that says its rule."""
    method = METHODS[name]
    members = (row["frontier"], row["policy"], row["drafter"]) == (method.frontier, method.policy, method.drafter)
    rule = {key: value for key, value in method.sampling.items() if key in ("factor", "entropy_bound")}
    same = row["method"] == name or bool(rule and rule.items() <= row["said"].items())
    return "refused" not in row and row["part"] == "first" and members and same
