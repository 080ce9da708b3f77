"""Grade-school word problems made by rule, with worked answers that are right by construction."""

from unmask.problems.answers import extract_answer, extract_answers
from unmask.problems.compose import Problem, iter_problems, make_problem, make_problems

__all__ = ["Problem", "extract_answer", "extract_answers", "iter_problems", "make_problem", "make_problems"]
