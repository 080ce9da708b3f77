"""Requests from end to end on a GPU: one at a time, many at a time, and beside the public Fast-dLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _docs.results import Result, ceilings, found, made_with, of_each, single
from _docs.text import Columns, if_measured, markdown, optional, table

IDLE_AND_FLOOR: Columns = {
    "idle": if_measured("idle_share", ".1%"),
    "times the floor": if_measured("over_floor", ".2f"),
}


def _method(row: Result) -> str:
    """With what its captured steps must not be."""
    return f"`{row['method']}`" + (" NOT AS EAGER" if row.get("same_as_eager") is False else "")


LATENCY: Columns = {
    "method": _method,
    "tokens/s": "{tokens_per_second:.1f}",
    "ms a pass": "{ms_per_pass:.2f}",
    "tokens a pass": "{tokens_per_pass:.2f}",
    "rows a pass": "{rows_per_pass:.0f}",
    **IDLE_AND_FLOOR,
    "times vanilla at one token a pass": if_measured("over_vanilla_one", ".1f"),
    "times vanilla at as many": if_measured("over_vanilla_equal", ".1f"),
}
THROUGHPUT: Columns = {
    "method": _method,
    "seats": "{seats}",
    "requests": "{requests}",
    "tokens/s": "{tokens_per_second:.0f}",
    "ms a pass": "{ms_per_pass:.2f}",
    "rows a pass": "{rows_per_pass:.0f}",
    **IDLE_AND_FLOOR,
    "memory, GB": if_measured("allocated_GB", ".1f"),
}


@of_each("latency", ceilings)
def latency(result: Result) -> str:
    """One request at a time, with the yardsticks."""
    return table(result["rows"], LATENCY)


@of_each("throughput", ceilings)
def throughput(result: Result) -> str:
    """Many requests at a time."""
    return table(result["rows"], THROUGHPUT)


@of_each("latency", ceilings)
def trace(result: Result) -> str:
    """Where the time of a step goes."""
    row = next((row for row in result["rows"] if row.get("trace")), None)
    if row is None:
        return ""
    whole = sum(each["us"] for each in row["trace"])
    text = table(
        [each for each in row["trace"] if each["us"] >= whole / 1000],
        {
            "kernels": lambda each: f"`{each['kind']}`" if each["kind"].startswith("_") else each["kind"],
            "a step": "{calls:.1f}",
            "us a step": "{us:.0f}",
            "share": lambda each: f"{each['us'] / whole:.1%}",
        },
    )
    return f"`{row['method']}`, {row['seats']} seat:\n\n{text}"


def fast_dllm() -> str:
    """The public code's runs, then our one request by variant of its result file; how many times its dual cache."""
    theirs = single("fast_dllm")
    dual = max((row for row in theirs["rows"] if row["cache"] == "dual"), key=lambda row: row["tokens_per_pass"])
    head = ["what runs", "tokens a pass", "ms a pass", "of a whole canvas", "of a block", "tokens/s"]
    code, mended = theirs["theirs"], "; ".join(theirs["mended"]) or "nothing"
    about = f"Theirs: [{code['repository']}](https://{code['repository']}) at {code['commit'][:7]}, needed for it: "
    lines = [*(_their_line(row, dual) for row in theirs["rows"]), *_our_lines(dual)]
    return f"{markdown([*head, 'times their dual'], lines)}\n\n{about}{mended}; {made_with(theirs)}"


def _their_line(row: Result, dual: Result) -> list[Any]:
    same = row["tokens_per_pass"] == dual["tokens_per_pass"]
    return [
        f"Fast-dLLM, {'no' if row['cache'] == 'none' else row['cache']} cache",
        f"{row['tokens_per_pass']:.2f}",
        *(optional(row[name], ".1f") for name in ("ms_a_pass", "ms_full", "ms_cached")),
        f"{row['tokens_per_second']:.1f}",
        f"{row['tokens_per_second'] / dual['tokens_per_second']:.1f}" if same else "-",
    ]


def _our_lines(dual: Result) -> Iterator[list[Any]]:
    """A pass of ours costs the same at any number of tokens: it is set to what theirs commits."""
    for result in found("latency"):
        if "llada-8b" not in str(result["rows"][0]["model"]):
            continue
        name = ", ".join(filter(None, ["unmask, `flash-cache`", *result["variant"].split("_")]))
        for row in (each for each in result["rows"] if each["method"] == "flash-cache"):
            rate = dual["tokens_per_pass"] / row["ms_per_pass"] * 1e3
            pace = [f"{dual['tokens_per_pass']:.2f}", f"{row['ms_per_pass']:.1f}"]
            yield [name, *pace, "-", "-", f"{rate:.1f}", f"{rate / dual['tokens_per_second']:.1f}"]
