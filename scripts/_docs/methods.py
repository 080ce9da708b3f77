"""What the table of methods tells: its rows, what their members read, and what requests and rows may say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

from _docs import results
from _docs.text import code_words, markdown, sampling
from unmask import METHODS, Method, SamplingParams
from unmask.cli.options import field_docs
from unmask.methods import _ALLOWED, DRAFTERS, FRONTIERS, OPTIONS, POLICIES

RULES = ("steps", "threshold", "factor", "entropy_bound")
OF_A_SCHEDULE = ("steps", "alg", "remasking")
NAMES = re.compile(r"<!-- begin method-settings((?: [\w-]+)+) -->")
RECOMPUTED = {
    "recompute": "everything",
    "prefix": "the block and all behind it",
    "dual": "the block",
    "tracked": "a window, and what it looks at most",
    "block-causal": "the blocks in flight",
    "delayed": "what was not known two passes ago",
    "drift": "the answer, in each layer the rows that drifted most",
    "elastic": "a window, and everything behind a layer whose attention drifted",
}


# --- all of them


def summary() -> str:
    """Every row of the table, in short."""
    pages = _pages()
    rows = [
        [_linked(row.name, pages), row.title, RECOMPUTED[row.policy], _cited(row.paper)] for row in METHODS.values()
    ]
    return markdown(["method", "what it does", "recomputed", "paper"], rows)


def _pages() -> dict[str, str]:
    """The page of each method: the one whose table of settings names it."""
    pages = sorted((results.ROOT / "docs" / "methods").glob("*.md"))
    names = {page.name: NAMES.search(page.read_text(encoding="utf-8")) for page in pages}
    return {name: page for page, match in names.items() if match for name in match[1].split()}


def _linked(name: str, pages: dict[str, str]) -> str:
    """A method's name, with its page where it has one."""
    return f"[`{name}`](docs/methods/{pages[name]})" if name in pages else f"`{name}`"


def _cited(paper: str) -> str:
    return f"[{paper}](https://arxiv.org/abs/{paper.split()[-1]})" if paper else "-"


def choices() -> str:
    """The choices of every row."""
    return markdown(
        ["method", "frontier", "policy", "drafter", "recommended"],
        [[f"`{row.name}`", row.frontier, row.policy, row.drafter, sampling(row.sampling)] for row in METHODS.values()],
    )


def fields_read() -> str:
    """The request fields that only some members read."""
    axes = {"frontier": FRONTIERS, "policy": POLICIES, "drafter": DRAFTERS}
    rows = [[axis, f"`{name}`", code_words(read)] for axis, members in axes.items() for name, read in members.items()]
    return markdown(["axis", "member", "reads of a request"], rows)


def options() -> str:
    """What a row may set for all its requests."""
    rows = [
        [f"`{member}`", f"`{name}`", f"`{value!r}`"]
        for member, options in OPTIONS.items()
        for name, value in options.items()
    ]
    return markdown(["member", "option", "default"], rows)


# --- those of a page


def rows_of(names: Sequence[str]) -> list[Method]:
    """The rows with these names; a page may name none that is gone."""
    if gone := [name for name in names if name not in METHODS]:
        raise SystemExit(f"no method is called {', '.join(gone)}; a page of docs/methods names it")
    return [METHODS[name] for name in names]


def settings(*names: str) -> str:
    """The request fields that decide how these methods run, as each row recommends; what rows set for all requests."""
    methods = rows_of(names)
    columns = ["default"] if len(methods) == 1 else [f"`{name}`" for name in names]
    wanted = {name for method in methods for name in _fields(method)}
    docs = field_docs(SamplingParams)
    said = [field.name for field in fields(SamplingParams) if field.name in wanted]
    fixed = list(dict.fromkeys(name for method in methods for name in method.all_options))
    tables = {
        ("field", "what it does"): [
            [f"`{name}`", *(_default(method, name) for method in methods), docs[name]] for name in said
        ],
        ("option", "may be"): [
            [f"`{name}`", *(_option(method, name) for method in methods), _allowed(name)] for name in fixed
        ],
    }
    return "\n\n".join(markdown([first, *columns, last], rows) for (first, last), rows in tables.items() if rows)


def _fields(method: Method) -> set[str]:
    """What its members read, what it recommends, and what its schedule reads if it has no rule."""
    scheduled = not any(name in method.sampling for name in RULES)
    more = (*OF_A_SCHEDULE, *(() if method.schedule == "even" else ("eps",))) if scheduled else ()
    return {*method.reads, *method.sampling, *more}


def _default(method: Method, name: str) -> str:
    if name not in _fields(method):
        return "not read"
    return f"`{method.sampling[name]}`" if name in method.sampling else "-"


def _option(method: Method, name: str) -> str:
    return f"`{method.all_options[name]}`" if name in method.all_options else "not read"


def _allowed(name: str) -> str:
    allowed = _ALLOWED[name]
    if isinstance(allowed, tuple):
        return code_words(allowed)
    if isinstance(allowed, float):
        return f"{allowed:g} to 1"
    share = ", or a share up to 1" if name == "rank" else ""
    return f"an integer from {allowed} on{share}"


def costs(*names: str) -> str:
    """Rows of a pass and bytes of a position."""
    from _docs import costs

    return costs.table(rows_of(names))
