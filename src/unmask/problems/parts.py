"""The pieces problems are composed of, and how their numbers are drawn.

A `Part` is declarative: sentences, a rule that draws its numbers, and steps written as small formulas. In
sentences and formulas `a b c d` are the numbers drawn, `v` is the running value the story has reached and
`s1 s2 ...` are the results of the part's own earlier steps. `a % b` reads "a per cent of b".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from unmask.problems.words import Item

T = TypeVar("T")
Numbers = tuple[int, ...]
Draw = Callable[[random.Random, int], "Numbers | None"]
"""Draws the numbers of a part given the running value; None when no numbers fit."""

LARGEST = 400
"""No drawn sum or product passes this; a small model must be able to master the arithmetic."""

PERCENTS = (10, 20, 25, 30, 40, 50, 60, 75, 80)
EASY_PERCENTS = (10, 20, 25, 50)
"""The ones asked of amounts above a hundred."""


class Formula(NamedTuple):
    """One step: `left op right`, and the sentence that reports it (`{eq}` is the equation)."""

    left: str
    op: str
    right: str
    line: str


@dataclass(frozen=True)
class Part:
    """One declarative piece of a story; its value is its last step's result (`a` when it has none)."""

    name: str
    texts: tuple[str, ...]
    draw: Draw
    steps: tuple[Formula, ...] = ()


@dataclass(frozen=True)
class Setting:
    """Parts that fit together: any opener, then any moves, then any closer. A whole stands alone."""

    name: str
    items: tuple[Item, ...]
    openers: tuple[Part, ...]
    moves: tuple[Part, ...] = ()
    closers: tuple[Part, ...] = ()


def part(name: str, texts: str | tuple[str, ...], draw: Draw, *steps: str) -> Part:
    """Build a Part; each step reads "left op right: line"."""
    return Part(name, (texts,) if isinstance(texts, str) else texts, draw, tuple(map(_formula, steps)))


def _formula(step: str) -> Formula:
    head, _, line = step.partition(": ")
    left, op, right = head.split()
    return Formula(left, op, right, line)


def between(rng: random.Random, low: int, high: int) -> int:
    """A whole number in [low, high]; built on random() alone, whose stream Python promises to keep."""
    return low + int(rng.random() * (high - low + 1))


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """One of the options, each as likely."""
    return options[int(rng.random() * len(options))]


def none(_: random.Random, __: int) -> Numbers:
    """No numbers at all."""
    return ()


def ranges(*bounds: tuple[int, int]) -> Draw:
    """Independent numbers, one per (low, high) pair."""
    return lambda rng, _: tuple(between(rng, low, high) for low, high in bounds)


def count(rng: random.Random, _: int) -> Numbers:
    """A starting amount: mostly two digits, now and then three."""
    return (between(rng, 6, 60) if rng.random() < 0.7 else between(rng, 30, 150),)


def more(rng: random.Random, value: int) -> Numbers | None:
    """Something to add."""
    amount = between(rng, 2, 40) if rng.random() < 0.75 else between(rng, 20, 150)
    return (amount,) if value + amount <= LARGEST else None


def less(rng: random.Random, value: int) -> Numbers | None:
    """Something to take away that leaves at least two."""
    return (between(rng, 2, min(value - 2, 200)),) if value >= 5 else None


def beyond(rng: random.Random, value: int) -> Numbers | None:
    """A goal larger than the running value."""
    return (value + between(rng, 2, 90),) if value <= LARGEST - 90 else None


def times(rng: random.Random, value: int) -> Numbers | None:
    """A factor for the running value."""
    if not 2 <= value <= 100:
        return None
    factor = between(rng, 2, 12)
    return (factor,) if _in_tables(factor, value) else None


def _in_tables(factor: int, other: int) -> bool:
    """Whether a product is one to know: beyond ten only the tables up to twelve by twelve."""
    return factor * other <= LARGEST and (factor <= 10 or other <= 12)


def twice(_: random.Random, value: int) -> Numbers | None:
    """Room to double the running value."""
    return () if value <= 150 else None


def half(_: random.Random, value: int) -> Numbers | None:
    """An even running value."""
    return () if value % 2 == 0 and value >= 4 else None


def divisor(rng: random.Random, value: int) -> Numbers | None:
    """A divisor from 2 to 12 that leaves a quotient of at least two."""
    fits = [d for d in range(2, 13) if value % d == 0 and value >= 2 * d and _in_tables(d, value // d)]
    return (pick(rng, fits),) if fits else None


def percent(rng: random.Random, value: int) -> Numbers | None:
    """A percentage of the running value that is a whole number, and less than all but one of it."""
    options = PERCENTS if value <= 100 else EASY_PERCENTS
    fits = [p for p in options if value * p % 100 == 0 and 2 <= value * p // 100 <= value - 2]
    return (pick(rng, fits),) if fits else None


def groups(rng: random.Random, value: int) -> Numbers | None:
    """Groups to add: so many of so many each."""
    number, size = between(rng, 2, 9), between(rng, 2, 12)
    return (number, size) if value + number * size <= LARGEST else None


def groups_out(rng: random.Random, value: int) -> Numbers | None:
    """Groups to take away: so many of so many each, leaving at least two."""
    if value < 12:
        return None
    number = between(rng, 2, min(9, (value - 2) // 3))
    return number, between(rng, 2, min(12, (value - 2) // number))


def product(low: int, high: int) -> Draw:
    """A factor from 2 to 12 and another from low to high."""

    def draw(rng: random.Random, _: int) -> Numbers | None:
        first, second = between(rng, 2, 12), between(rng, low, high)
        return (first, second) if _in_tables(first, second) else None

    return draw


def given(draw: Draw, low: int = 6, high: int = 80) -> Draw:
    """A starting amount first, then numbers that fit it."""

    def drawn(rng: random.Random, _: int) -> Numbers | None:
        start = between(rng, low, high)
        rest = draw(rng, start)
        return None if rest is None else (start, *rest)

    return drawn


def where(draw: Draw, fits: Callable[..., bool]) -> Draw:
    """The numbers of `draw` when they satisfy `fits(*numbers)`, else None."""

    def drawn(rng: random.Random, value: int) -> Numbers | None:
        numbers = draw(rng, value)
        return numbers if numbers is not None and fits(*numbers) else None

    return drawn
