"""Exact match on generated word problems: does the number after ``####`` equal the answer?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unmask.config import SamplingParams
from unmask.engine.llm import LLM
from unmask.engine.outputs import RequestOutput
from unmask.problems import extract_answers, make_problems


@dataclass(frozen=True)
class Score:
    """What one setting reached on one set of requests."""

    num_requests: int
    num_problems: int
    num_correct: int
    num_tokens: int
    num_passes: int
    num_rows: int
    num_length: int
    """Answers that filled the canvas without an end of text."""
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of problems answered right."""
        return self.num_correct / self.num_problems

    @property
    def tokens_per_pass(self) -> float:
        """Useful tokens of all requests over all their passes."""
        return self.num_tokens / self.num_passes

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the ratios included."""
        return dict(vars(self)) | {"accuracy": self.accuracy, "tokens_per_pass": self.tokens_per_pass}


def held_out(num_requests: int, *, seed: int = 20_261_130, per_request: int = 1) -> list[dict[str, str]]:
    """Requests of the test split, always the same for one seed."""
    return list(make_problems(seed, num_requests, split="test", per_request=per_request))


def num_correct(answer: str, reference: str) -> tuple[int, int]:
    """Right answers and problems of one request; several problems are compared in order."""
    wanted, found = extract_answers(reference), extract_answers(answer)
    return sum(a == b for a, b in zip(wanted, found)), len(wanted)


def score(llm: LLM, problems: Sequence[dict[str, str]], params: SamplingParams) -> Score:
    """Ask everything as single-turn chats, and count."""
    start = time.perf_counter()
    conversations = [[{"role": "user", "content": problem["question"]}] for problem in problems]
    results = llm.chat(conversations, params)
    seconds = time.perf_counter() - start
    marks = [num_correct(result.outputs[0].text, problem["answer"]) for result, problem in zip(results, problems)]
    return _summed(results, marks, seconds)


def _summed(results: Sequence[RequestOutput], marks: Sequence[tuple[int, int]], seconds: float) -> Score:
    outputs = [result.outputs[0] for result in results]
    return Score(
        num_requests=len(results),
        num_problems=sum(total for _, total in marks),
        num_correct=sum(right for right, _ in marks),
        num_tokens=sum(output.num_committed for output in outputs),
        num_passes=sum(output.num_forward_passes for output in outputs),
        num_rows=sum(output.num_rows for output in outputs),
        num_length=sum(output.finish_reason == "length" for output in outputs),
        seconds=seconds,
    )
