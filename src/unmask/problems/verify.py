"""Check problems from the outside: arithmetic, plan, and that the question holds every number used."""

from __future__ import annotations

import re

from unmask.problems.answers import extract_answer
from unmask.problems.compose import Problem
from unmask.problems.plan import apply, execute

_EQUATION = re.compile(r"(\d+)(?: ([-+*/]) |(% of ))(\d+) = (\d+)")
WORD_NUMBERS = {"twice": 2, "half": 2, "dozen": 12}
"""Numbers a question may say in words."""


def equations(answer: str) -> list[tuple[int, str, int, int]]:
    """Every equation of a worked answer as (left, op, right, result)."""
    return [(int(a), op or "%", int(b), int(result)) for a, op, _, b, result in _EQUATION.findall(answer)]


def wrong_equations(answer: str) -> list[tuple[int, str, int, int]]:
    """The equations of a worked answer that do not hold."""
    return [(a, op, b, r) for a, op, b, r in equations(answer) if apply(op, a, b) != r]


def numbers_of(question: str) -> set[int]:
    """The numbers a question states, in digits or in words."""
    words = {WORD_NUMBERS[w] for w in re.findall(r"[a-z]+", question.lower()) if w in WORD_NUMBERS}
    return {int(digits) for digits in re.findall(r"\d+", question)} | words


def verify(problem: Problem) -> None:
    """Raise ValueError, saying what is wrong, unless the problem is sound.

    Every equation holds, there is one a line and step, the results are those of executing the plan, the last
    one is the value and the "####" number, and every operand is stated in the question or was computed.
    """
    found = equations(problem.answer)
    lines = problem.answer.split("\n")[:-1]
    _require(not wrong_equations(problem.answer), problem, "has a wrong equation")
    _require(len(found) == len(lines) == problem.num_steps, problem, "does not have one equation a step")
    _require([r for *_, r in found] == execute(problem.plan), problem, "disagrees with its plan")
    _require(found[-1][3] == problem.value == extract_answer(problem.answer), problem, "ends in another value")
    known = numbers_of(problem.question)
    for a, _, b, result in found:
        _require({a, b} <= known, problem, "uses a number that is not given")
        known.add(result)


def _require(holds: bool, problem: Problem, fault: str) -> None:
    if not holds:
        raise ValueError(f"problem {fault}: {problem.question!r} -> {problem.answer!r}")
