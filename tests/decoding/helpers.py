"""Short words for the decoding tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oracles.decoding import Run
from unmask import LLM, RequestOutput, SamplingParams

PROBABILITY_TOLERANCE = 1e-4
SAFE_MARGIN = 2e-5
"""A run whose closest decision was nearer than this may turn on rounding (fp32 products differ with their shape)."""

Request = tuple[Sequence[int], SamplingParams]


def engine(model: Any, method: str = "vanilla", **options: Any) -> LLM:
    """An engine on the CPU in fp32 without a tokenizer."""
    settings = {"dtype": "float32", "device": "cpu", "tokenizer": None, "max_num_seqs": 32} | options
    return LLM(model=model, method=method, **settings)


def generate(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    """All requests in one call."""
    prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in requests]
    return llm.generate(prompts, [params for _, params in requests])


def one(llm: LLM, prompt: Sequence[int], **params: Any) -> RequestOutput:
    """One request alone."""
    return generate(llm, [(prompt, SamplingParams(**params))])[0]


def facts(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All that must not depend on the batch, one entry an answer."""
    return [
        (o.index, o.token_ids, o.num_forward_passes, o.num_rows, o.finish_reason, o.stop_reason, commits(output, i))
        for i, o in enumerate(output.outputs)
    ]


def commits(output: RequestOutput, answer: int = 0) -> list[tuple[int, int, int]]:
    """(position, token, pass) of the returned tokens of one answer, by position; empty without a trajectory."""
    result = output.outputs[answer]
    events = sorted(result.trajectory or [], key=lambda event: event.position)
    return [(e.position, e.token_id, e.num_pass) for e in events if e.position < len(result.token_ids)]


def order(output: RequestOutput) -> list[int]:
    """Answer positions in the order of their commits, leftmost first within a pass."""
    return [position for position, _, _ in sorted(commits(output), key=lambda c: (c[2], c[0]))]


def assert_equal(output: RequestOutput, run: Run) -> None:
    """The engine's answer is the oracle's: ids, passes, rows, reasons, and every commit."""
    answer = output.outputs[0]
    assert answer.token_ids == run.token_ids
    assert answer.num_forward_passes == run.num_passes
    assert answer.num_rows == run.num_rows
    assert (answer.finish_reason, answer.stop_reason) == (run.finish_reason, run.stop_reason)
    assert commits(output) == [(c.position, c.token_id, c.num_pass) for c in run.commits]
    events = sorted(answer.trajectory or [], key=lambda event: event.position)[: len(run.commits)]
    for event, commit in zip(events, run.commits, strict=True):
        assert abs(event.probability - commit.probability) < PROBABILITY_TOLERANCE
