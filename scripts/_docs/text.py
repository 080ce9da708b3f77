"""Markdown, and what its cells say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Any], Any]]
"""A column's cells by its heading: a format string for the values of a row, or a function of the row."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def table(rows: Iterable[Any], columns: Columns) -> str:
    """A Markdown table of these rows."""
    cells = [cell.format_map if isinstance(cell, str) else cell for cell in columns.values()]
    return markdown(list(columns), [[cell(row) for cell in cells] for row in rows])


def optional(value: float | None, form: str) -> str:
    """A dash for what was not measured."""
    return "-" if value is None else format(value, form)


def if_measured(name: str, form: str) -> Callable[[Row], str]:
    """A column of what not every row has."""
    return lambda row: optional(row.get(name), form)


def code_words(words: Iterable[Any]) -> str:
    """Each as code; a dash for none."""
    return ", ".join(f"`{word}`" for word in words) or "-"


def sampling(values: Mapping[str, Any]) -> str:
    """What a method or a model recommends."""
    return code_words(f"{name}={value}" for name, value in values.items())


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows with the same values of these, in the order of their first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
