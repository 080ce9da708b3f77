"""The plan behind a worked answer: steps over given numbers and earlier results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Ref(NamedTuple):
    """The result of an earlier step, by its index in the plan."""

    step: int


Operand = int | Ref

KINDS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide", "%": "percent"}


class Step(NamedTuple):
    """`left op right`; `%` reads "left per cent of right"."""

    op: str
    left: Operand
    right: Operand

    @property
    def kind(self) -> str:
        return KINDS[self.op]


def apply(op: str, a: int, b: int) -> int:
    """The exact result; ValueError when it is not a whole number of at least zero."""
    if op == "+":
        return a + b
    if op == "*":
        return a * b
    if op == "-":
        result, rest = a - b, 0
    elif op == "/":
        result, rest = divmod(a, b)
    else:
        result, rest = divmod(a * b, 100)
    if rest or result < 0:
        raise ValueError(f"{a} {op} {b} has no whole, non-negative result")
    return result


def execute(plan: Sequence[Step]) -> list[int]:
    """The result of every step, from the given numbers alone."""
    results: list[int] = []
    for step in plan:
        a, b = (results[x.step] if isinstance(x, Ref) else x for x in (step.left, step.right))
        results.append(apply(step.op, a, b))
    return results
