"""The engine gives what the reference implementations gave: ids, passes and commits, batched and alone.

All cases of a model run in one batch, each with its own rule, schedule, guidance and filters; and each runs alone.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

import pytest

from decoding.helpers import commits, engine, generate
from oracles.golden import NAMED_REFERENCE_BUG, ROOT, Case, dream_cases, llada_cases, tiny_model
from unmask import LLM, RequestOutput

LLADA, DREAM = llada_cases(), dream_cases()
BATCHES = [(name, eos) for name in ("tiny-llada", "tiny-llada-gqa") for eos in (None, (39,), (140, 225))]


@functools.cache
def loaded(name: str, eos_ids: tuple[int, ...] | None, method: str, max_num_seqs: int = 32) -> LLM:
    return engine(tiny_model(name, eos_ids), method, max_num_seqs=max_num_seqs)


def differences(output: RequestOutput, case: Case) -> list[str]:
    """What differs from the reference, in words."""
    answer, out = output.outputs[0], []
    if answer.token_ids != list(case.output):
        out.append(f"{case.id}: ids {answer.token_ids}, reference {list(case.output)}")
    if answer.num_forward_passes != case.num_passes:
        out.append(f"{case.id}: {answer.num_forward_passes} passes, reference {case.num_passes}")
    if case.steps is not None:
        passes: list[list[tuple[int, int]]] = [[] for _ in range(answer.num_forward_passes)]
        for position, token, num_pass in commits(output):
            passes[num_pass - 1].append((position, token))
        if [tuple(sorted(p)) for p in passes] != list(case.steps):
            out.append(f"{case.id}: commits {passes}, reference {case.steps}")
    return out


def check(llm: LLM, cases: Sequence[Case]) -> None:
    outputs = generate(llm, [(case.prompt, case.params) for case in cases])
    wrong = [line for output, case in zip(outputs, cases, strict=True) for line in differences(output, case)]
    assert [line for line in wrong if not line.startswith(NAMED_REFERENCE_BUG)] == []
    if any(case.id == NAMED_REFERENCE_BUG for case in cases):
        assert any(line.startswith(NAMED_REFERENCE_BUG) for line in wrong)


@pytest.mark.parametrize(("name", "eos_ids"), BATCHES)
def test_llada_in_one_mixed_batch(name: str, eos_ids: tuple[int, ...] | None) -> None:
    """Vanilla, guided, threshold and factor requests side by side. Other cases ignore end-of-text, so a model with
    the replaced ids of one case serves them all."""
    check(loaded(name, eos_ids, "vanilla"), [c for c in LLADA if c.model == name and c.eos_ids in (None, eos_ids)])


def test_dream_in_one_mixed_batch() -> None:
    """Three rankings, filters, and the budgeted threshold; the reference's padded batches run as plain requests."""
    check(loaded("tiny-dream", None, "dream"), DREAM)


@pytest.mark.parametrize("max_num_seqs", [2, 5])
def test_few_seats(max_num_seqs: int) -> None:
    """Requests that join while others are in the middle of their schedule."""
    cases = [case for case in LLADA if case.model == "tiny-llada" and case.eos_ids is None]
    random.Random(max_num_seqs).shuffle(cases)
    check(loaded("tiny-llada", None, "vanilla", max_num_seqs), cases)
    cases = random.Random(max_num_seqs).sample(DREAM, len(DREAM))
    check(loaded("tiny-dream", None, "dream", max_num_seqs), cases)


@pytest.mark.parametrize("case", [*LLADA, *DREAM], ids=lambda case: case.id)
def test_alone(case: Case) -> None:
    method = "dream" if case.curve else "vanilla"
    check(loaded(case.model, case.eos_ids, method), [case])


@pytest.mark.parametrize("method", ["vanilla", "confidence", "factor", "entropy-bound"])
def test_the_request_overrules_the_method(method: str) -> None:
    """These rows differ in their defaults only: said parameters decide."""
    cases = [case for case in LLADA if case.model == "tiny-llada-gqa"]
    check(loaded("tiny-llada-gqa", None, method), cases)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_from_the_directory(dtype: str) -> None:
    """The same through the package's own loader, and in fp64."""
    cases = [case for case in LLADA if case.model == "tiny-llada" and case.eos_ids is None]
    check(engine(ROOT / "models" / "tiny-llada", dtype=dtype), cases)
    check(engine(ROOT / "models" / "tiny-dream", "dream", dtype=dtype), DREAM)


def test_it_can_fail() -> None:
    """Cases with each other's parameters do not pass."""
    cases = [case for case in LLADA if case.model == "tiny-llada-gqa"]
    outputs = generate(
        loaded("tiny-llada-gqa", None, "vanilla"), [(a.prompt, b.params) for a, b in itertools.pairwise(cases)]
    )
    assert all(differences(output, case) for output, case in zip(outputs, cases))
