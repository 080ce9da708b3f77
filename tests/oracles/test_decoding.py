"""The oracle itself gives what the reference implementations gave: ids, passes, and every pass's commits."""

from __future__ import annotations

import pytest

from oracles.decoding import Run, decode, family_of, network_of
from oracles.golden import NAMED_REFERENCE_BUG, Case, dream_cases, llada_cases, tiny_model

CASES = [*llada_cases(), *dream_cases()]


def run(case: Case) -> Run:
    model = tiny_model(case.model, case.eos_ids)
    return decode(network_of(model), family_of(model), case.prompt, case.params, curve=case.curve)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_the_reference(case: Case) -> None:
    answer = run(case)
    if case.id == NAMED_REFERENCE_BUG:
        assert (answer.token_ids, answer.num_passes) != (list(case.output), case.num_passes)
        return
    assert answer.token_ids == list(case.output)
    assert answer.num_passes == case.num_passes
    if case.steps is not None:
        passes = [
            tuple(sorted((c.position, c.token_id) for c in answer.commits if c.num_pass == n + 1))
            for n in range(answer.num_passes)
        ]
        assert passes == list(case.steps)


def test_only_the_named_bug_is_refused() -> None:
    assert sum(case.id == NAMED_REFERENCE_BUG for case in CASES) == 1
    assert len(CASES) == 11 + 5 + 4 + 15 + 3 + 3  # two cases of dream_generate hold three and two prompts


def test_it_can_fail() -> None:
    """Another schedule, or the neighbouring row's logits, gives another answer."""
    case = next(case for case in CASES if case.id == "dream-entropy-6")
    model = tiny_model(case.model)
    flat = decode(network_of(model), family_of(model), case.prompt, case.params)
    assert flat.token_ids != list(case.output)
