"""Infilling: pinned tokens never change, every hole is filled, and the result is the oracle's."""

from __future__ import annotations

import random
from typing import Any

import pytest

from decoding.helpers import PROBABILITY_TOLERANCE, SAFE_MARGIN, engine
from oracles.decoding import family_of, infill, network_of
from oracles.golden import tiny_model
from stubs import EOS, EOT, MASK, Stub, View
from unmask import LLM, RequestError, SamplingParams, UnmaskError

MODELS = [("tiny-llada", "vanilla"), ("tiny-llada-gqa", "vanilla"), ("tiny-dream", "dream"), ("tiny-dream", "vanilla")]
# Holes at the start, at the end, one, several, all.
SHAPES = {
    "start": [0],
    "start-run": [0, 1, 2],
    "end": [11],
    "inside": [4, 5, 6],
    "several": [0, 3, 4, 8, 11],
    "all-but-one": list(range(11)),
}
RULES: list[dict[str, Any]] = [
    {"threshold": 0.6},
    {"threshold": 0.6, "block_length": 4},
    {"factor": 1.0},
    {"entropy_bound": 0.5, "alg": "entropy"},
    {"steps": 1},
    {"steps": 1, "alg": "entropy", "top_k": 5},
]


def text(holes: list[int], mask: int, seed: int, length: int = 12) -> list[int]:
    generator = random.Random(seed)
    return [mask if i in holes else generator.randrange(300) for i in range(length)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda row: f"{row[0]}-{row[1]}")
def loaded(request: pytest.FixtureRequest) -> tuple[str, str, LLM]:
    name, method = request.param
    return name, method, engine(tiny_model(name), method)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_oracle(loaded: tuple[str, str, LLM], shape: str) -> None:
    name, method, llm = loaded
    model, compared = tiny_model(name), 0
    rules = [rule for rule in RULES if method == "vanilla" or "block_length" not in rule]
    for seed, rule in enumerate(rules):
        canvas = text(SHAPES[shape], model.config.mask_token_id, seed)
        params = SamplingParams(trajectory=True, **{"alg": "maskgit_plus"} | rule)
        run = infill(network_of(model), family_of(model), canvas, params, curve=method == "dream")
        output = llm.infill({"token_ids": canvas}, params)
        answer = output.outputs[0]
        assert len(answer.token_ids) == len(canvas)
        for i, token in enumerate(canvas):
            assert token in (model.config.mask_token_id, answer.token_ids[i]), "a pinned token changed"
        assert model.config.mask_token_id not in answer.token_ids
        assert answer.finish_reason == "length"
        if run.margin < SAFE_MARGIN:
            continue
        compared += 1
        assert answer.token_ids == run.token_ids
        assert (answer.num_forward_passes, answer.num_rows) == (run.num_passes, run.num_rows)
        events = sorted(answer.trajectory or [], key=lambda e: e.position)
        events = [e for e in events if e.num_pass > 0]  # given tokens may be listed with pass 0
        assert [(e.position, e.token_id, e.num_pass) for e in events] == [
            (c.position, c.token_id, c.num_pass) for c in run.commits
        ]
        assert all(
            abs(e.probability - c.probability) < PROBABILITY_TOLERANCE for e, c in zip(events, run.commits, strict=True)
        )
    assert compared >= len(rules) - 2


def test_the_comparison_can_fail() -> None:
    """Another pinned token gives another filling."""
    model = tiny_model("tiny-llada")
    canvas = text([3, 4, 5, 6, 7], model.config.mask_token_id, 1)
    params = SamplingParams(threshold=0.6, block_length=0)
    run = infill(network_of(model), family_of(model), canvas, params)
    other = [7, *canvas[1:]] if canvas[0] != 7 else [8, *canvas[1:]]
    assert engine(model).infill({"token_ids": other}, params).outputs[0].token_ids[1:] != run.token_ids[1:]


@pytest.mark.parametrize("end", [EOS, EOT])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_of_text_in_holes(end: int, temperature: float) -> None:
    """Text follows a hole, so it cannot hold the end."""
    llm = engine(Stub(lambda _: {end: 0.9, 7: 0.08}))
    canvas = [1, MASK, MASK, 4, MASK, 6]
    params = SamplingParams(threshold=0.9, temperature=temperature, seed=3)
    answer = llm.infill({"token_ids": canvas}, params).outputs[0]
    assert len(answer.token_ids) == 6
    assert not {EOS, EOT, MASK} & set(answer.token_ids)
    if temperature == 0:
        assert answer.token_ids == [1, 7, 7, 4, 7, 6]


def test_a_pinned_end_of_text_is_only_a_token() -> None:
    """What the caller wrote does not end anything."""
    llm = engine(Stub(lambda _: {7: 0.95}))
    answer = llm.infill({"token_ids": [1, EOS, MASK, EOT, MASK, 6]}, SamplingParams(threshold=0.9)).outputs[0]
    assert answer.token_ids == [1, EOS, 7, EOT, 7, 6]
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("shift", [0, 1])
def test_holes_read_the_right_row(shift: int) -> None:
    """With a shift, position p comes from row p - 1, and position 0 from its own: the script says which row spoke."""

    def script(view: View) -> dict[int, float]:
        return {10 + view.position: 0.95}

    answer = engine(Stub(script, shift=shift)).infill(
        {"token_ids": [MASK, 2, MASK, MASK, 3]}, SamplingParams(threshold=0.9, block_length=2)
    )
    # the stub's row 0 speaks for position 1 under a shift, and position 0 has no other row
    assert answer.outputs[0].token_ids == [10 + shift, 2, 12, 13, 3]


def test_refused() -> None:
    llm = engine(Stub(lambda _: {7: 0.95}))
    params = SamplingParams(threshold=0.9)
    for bad in ({"token_ids": []}, {"token_ids": [1, 99]}, {"token_ids": [1, -1, MASK]}, {"token_ids": "text"}):
        with pytest.raises((RequestError, UnmaskError, ValueError)):
            llm.infill(bad, params)
    assert llm.infill({"token_ids": [1, MASK]}, params).outputs[0].token_ids == [1, 7]
