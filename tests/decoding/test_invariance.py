"""A request's answer does not depend on its company: alone, batched, permuted, with neighbours that finish earlier or
join later, it has the same tokens in the same passes with the same rows.

Every rule is among the requests, guidance and sampling with seeds too. Two networks that leak on purpose fail the same
check, so it can see what it looks for.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from decoding.helpers import Request, engine, facts, generate
from oracles.golden import tiny_model
from stubs import Stub, View
from unmask import LLM, SamplingParams
from unmask.models.transformer import Transformer
from unmask.ops import Sight

SHARED: list[dict[str, Any]] = [
    {"steps": 6, "max_tokens": 12, "block_length": 4},
    {"steps": 12, "max_tokens": 12, "block_length": 0},
    {"threshold": 0.7, "max_tokens": 14, "block_length": 7},
    {"factor": 1.3, "max_tokens": 9, "block_length": 0},
    {"entropy_bound": 0.4, "max_tokens": 10, "block_length": 5},
    {"steps": 5, "max_tokens": 10, "block_length": 0, "cfg_scale": 1.2},
    {"threshold": 0.5, "max_tokens": 8, "block_length": 4, "cfg_scale": 0.5, "ignore_eos": False},
    {"steps": 4, "max_tokens": 7, "block_length": 0, "alg": "topk_margin", "top_k": 4},
    {"steps": 7, "max_tokens": 7, "block_length": 3, "temperature": 0.8, "seed": 11},
    {"threshold": 0.6, "max_tokens": 16, "block_length": 8, "temperature": 1.2, "seed": 12, "top_p": 0.9},
    {"steps": 6, "max_tokens": 6, "block_length": 0, "remasking": "random", "seed": 13},
    {"steps": 5, "max_tokens": 11, "block_length": 0, "alg": "entropy", "alg_temp": 0.4, "seed": 14},
    {"steps": 4, "max_tokens": 8, "block_length": 4, "temperature": 2.5, "seed": 16, "min_p": 0.1, "cfg_scale": 0.7},
    {"threshold": 0.9, "max_tokens": 1, "block_length": 0},
]
DREAM: list[dict[str, Any]] = [
    {"steps": 4, "max_tokens": 12, "threshold": 0.6, "alg": "confidence_threshold_budget"},
    {"steps": 12, "max_tokens": 12, "alg": "maskgit_plus"},
    {"steps": 5, "max_tokens": 13, "alg": "origin", "temperature": 0.7, "seed": 15},
    *({name: value for name, value in said.items() if name != "block_length"} for said in SHARED),
]
WINDOW: list[dict[str, Any]] = [
    {"threshold": 0.8, "max_tokens": 12, "decode_window": 4},
    {"entropy_bound": 0.5, "max_tokens": 9, "decode_window": 3, "temperature": 0.7, "seed": 17},
    {"factor": 1.1, "max_tokens": 15, "decode_window": 6, "cfg_scale": 0.5},
]


def requests(settings: Sequence[dict[str, Any]], seed: int = 0) -> list[Request]:
    """The settings over prompts of unequal lengths."""
    generator = random.Random(seed)
    out = []
    for number, said in enumerate(settings):
        prompt = [generator.randrange(300) for _ in range(1 + (number * 5) % 23)]
        out.append((prompt, SamplingParams(**{"ignore_eos": True, "trajectory": True} | said)))
    return out


def test_small_passes() -> None:
    """A row limit that fits one or two canvases, and one that fits none."""
    model, batch = tiny_model("tiny-llada"), requests(SHARED)
    whole = [facts(output) for output in generate(engine(model), batch)]
    for limit in (60, 5):
        llm = engine(model, max_num_batched_tokens=limit)
        assert [facts(output) for output in generate(llm, batch)] == whole


def check(build: Callable[[int], LLM], batch: Sequence[Request]) -> None:
    """Alone == together == in another order == with few seats."""
    llm = build(32)
    alone = [facts(generate(llm, [request])[0]) for request in batch]
    assert [facts(output) for output in generate(llm, batch)] == alone
    places = random.Random(1).sample(range(len(batch)), len(batch))
    shuffled = generate(llm, [batch[place] for place in places])
    assert [facts(output) for output in shuffled] == [alone[place] for place in places]
    few = build(3)
    assert [facts(output) for output in generate(few, batch)] == alone
    assert [facts(output) for output in generate(few, list(batch)[::-1])] == alone[::-1]


ROWS = [("tiny-llada", "vanilla", SHARED), ("tiny-llada-gqa", "vanilla", SHARED), ("tiny-llada", "window", WINDOW)]
ROWS += [("tiny-dream", "dream", DREAM), ("tiny-dream", "window", WINDOW)]


@pytest.mark.parametrize(("name", "method", "said"), ROWS, ids=[f"{name}-{method}" for name, method, _ in ROWS])
def test_alone_equals_batched(name: str, method: str, said: list[dict[str, Any]]) -> None:
    check(lambda seats: engine(tiny_model(name), method, max_num_seqs=seats), requests(said))


def test_ends_of_text_in_company() -> None:
    """Some end at once, some in the middle, some never: the others do not notice."""
    llm_of = {seats: engine(tiny_model("tiny-llada", (54, 100)), max_num_seqs=seats) for seats in (3, 32)}
    said = [one | {"ignore_eos": number % 4 == 3} for number, one in enumerate(SHARED * 2)]
    batch = requests(said, seed=4)
    check(llm_of.__getitem__, batch)
    reasons = {output.outputs[0].finish_reason for output in generate(llm_of[32], batch)}
    assert reasons == {"stop", "length"}


def test_several_answers_of_a_neighbour() -> None:
    """A request with n answers among others."""
    batch = requests(SHARED)
    batch[8] = (batch[8][0], batch[8][1].replace(n=3))
    check(lambda seats: engine(tiny_model("tiny-llada"), max_num_seqs=seats), batch)


def test_repeats_give_the_same() -> None:
    llm = engine(tiny_model("tiny-llada"))
    batch = requests(SHARED)
    first = [facts(output) for output in generate(llm, batch)]
    assert [facts(output) for output in generate(llm, batch)] == first
    assert [facts(output) for output in generate(engine(tiny_model("tiny-llada")), batch)] == first


def test_seeds_matter() -> None:
    """Sampling is not constant: another seed gives another answer, for tokens and for the order alike."""
    llm = engine(tiny_model("tiny-llada"))
    for number in (8, 10, 11, 12):
        prompt, params = requests(SHARED)[number]
        answers = {str(facts(generate(llm, [(prompt, params.replace(seed=seed))])[0])) for seed in range(4)}
        assert len(answers) > 1, params


def test_finished_seats_leave_no_rows() -> None:
    """A pass holds the rows of the running requests and no others."""

    def script(view: View) -> dict[int, float]:
        return {view.first: 0.95 if view.first == 1 else 0.3}

    stub = Stub(script)
    llm = engine(stub)
    batch = [([1] * 4, SamplingParams(max_tokens=6, threshold=0.9)), ([2] * 7, SamplingParams(max_tokens=5, steps=5))]
    first, second = generate(llm, batch)
    assert [call.num_rows for call in stub.calls] == [10 + 12, 12, 12, 12, 12]
    assert (first.num_rows, second.num_rows) == (10, 60)


# --- negative controls


class Leaky(Transformer):
    """Rows of one pass see each other's mean, whoever they belong to."""

    def forward(self, token: Tensor, ctx: Any) -> Tensor:
        hidden = super().forward(token, ctx)
        return hidden + 0.3 * hidden.mean(dim=0)


def test_control_rows_of_other_requests() -> None:
    model = copy.copy(tiny_model("tiny-llada"))
    model.__class__ = Leaky
    with pytest.raises(AssertionError):
        check(lambda seats: engine(model, max_num_seqs=seats), requests(SHARED))


def test_control_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that also sees the padding that a longer neighbour causes."""
    check(lambda seats: engine(tiny_model("tiny-llada"), max_num_seqs=seats), requests(SHARED[:4]))

    def careless(self: Sight) -> list[Any]:
        return [replace(group, allowed_gRK=None) for group in groups(self)]

    groups = Sight.groups.func
    monkeypatch.setattr(Sight, "groups", property(careless))
    with pytest.raises(AssertionError):
        check(lambda seats: engine(tiny_model("tiny-llada"), max_num_seqs=seats), requests(SHARED[:4]))
