"""Random requests in random company: the engine equals the one-request oracle in ids, passes, rows, reasons and in the
commit order, for every rule, ranking, filter, end-of-text setting and guidance, on three tiny networks.

Sampled runs are replayed: each token against the distribution that the oracle gives it.

Runs in which some decision was closer than fp32 rounding are not compared (about one in a hundred).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from decoding.helpers import PROBABILITY_TOLERANCE, SAFE_MARGIN, Request, assert_equal, engine, generate
from oracles.decoding import Run, decode, family_of, network_of, predict
from oracles.golden import tiny_model
from unmask import LLM, RequestOutput, SamplingParams

# Ids that these networks like to predict, so that ends and bans are met, not only allowed.
LIKED = {
    "tiny-llada": (54, 306, 228, 100, 93, 23, 140, 217),
    "tiny-llada-gqa": (225, 301, 93, 130, 204, 60, 11, 263),
    "tiny-dream": (152, 200, 10, 105, 182, 290, 109, 225),
}
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@functools.cache
def loaded(name: str, method: str) -> LLM:
    return engine(tiny_model(name, LIKED[name][:2]), method, max_num_seqs=3, max_model_len=64)


def oracle(name: str, method: str, request: Request) -> Run:
    model = tiny_model(name, LIKED[name][:2])
    prompt, params = request
    return decode(network_of(model), family_of(model), prompt, params, curve=method == "dream")


@st.composite
def endings(draw: st.DrawFn, name: str, max_tokens: int) -> dict[str, Any]:
    """Ends, bans and filters."""
    liked = LIKED[name]
    kept: dict[str, Any] = {"ignore_eos": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        kept["stop_token_ids"] = tuple(draw(st.sets(st.sampled_from(liked[2:5]), max_size=2)))
    if draw(st.integers(0, 3)) == 0:
        kept["suppress_token_ids"] = tuple(draw(st.sets(st.sampled_from(liked[2:]), max_size=3)))
    if not kept["ignore_eos"]:
        kept["suppress_eos"] = draw(st.integers(0, 4)) == 0
        kept["min_tokens"] = draw(st.sampled_from([0, 0, 1, 3])) if max_tokens >= 3 else 0
    if draw(st.integers(0, 2)) == 0:
        kept["top_k"] = draw(st.sampled_from([0, 1, 2, 5]))
        kept["top_p"] = draw(st.sampled_from([1.0, 0.95, 0.6]))
        kept["min_p"] = draw(st.sampled_from([0.0, 0.05, 0.3]))
    return kept


@st.composite
def rules(draw: st.DrawFn, method: str, max_tokens: int) -> dict[str, Any]:
    """One way to say how many, one to say which."""
    alg = draw(st.sampled_from(["maskgit_plus", "topk_margin", "entropy"]))
    block_length = draw(st.sampled_from([0, 0, 1, 3, 4, 8])) if method == "vanilla" else 0
    num_blocks = -(-max_tokens // block_length) if block_length else 1
    kinds = ["steps", "threshold", "factor", "entropy_bound", "nothing"]
    kind = draw(st.sampled_from([*kinds, "budget"] if method == "dream" else kinds))
    out: dict[str, Any] = {"block_length": block_length} if method == "vanilla" else {}
    if method == "window":
        out["decode_window"] = draw(st.integers(1, 6))
        kind = "threshold" if kind in ("steps", "nothing") else kind
    if kind == "steps":
        return out | {"steps": draw(st.integers(num_blocks, max_tokens + 2)), "alg": alg}
    if kind == "nothing":  # one token a pass
        return out | {"steps": max_tokens, "alg": alg} if method != "vanilla" else out | {"alg": alg}
    if kind == "threshold":
        return out | {"threshold": draw(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])), "alg": "maskgit_plus"}
    if kind == "factor":
        return out | {"factor": draw(st.sampled_from([0.3, 0.8, 1.5, 3.0])), "alg": "maskgit_plus"}
    if kind == "entropy_bound":
        return out | {"entropy_bound": draw(st.sampled_from([0.0, 0.1, 0.7, 3.0])), "alg": "entropy"}
    steps = draw(st.sampled_from([n for n in range(1, max_tokens + 1) if max_tokens % n == 0]))
    threshold = draw(st.sampled_from([0.3, 0.6, 0.9]))
    return {"steps": steps, "threshold": threshold, "alg": "confidence_threshold_budget"}


@st.composite
def requests(draw: st.DrawFn, name: str, method: str) -> list[Request]:
    out: list[Request] = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 315), min_size=1, max_size=10))
        max_tokens = draw(st.integers(1, 12))
        kept = draw(rules(method, max_tokens)) | draw(endings(name, max_tokens))
        if draw(st.integers(0, 3)) == 0:
            kept["cfg_scale"] = draw(st.sampled_from([0.5, 1.5]))
        if method == "dream":
            kept["eps"] = draw(st.sampled_from([1e-3, 0.1]))
        out.append((prompt, SamplingParams(max_tokens=max_tokens, trajectory=True, **kept)))
    return out


def compare(name: str, method: str, batch: list[Request]) -> None:
    runs = [oracle(name, method, request) for request in batch]
    outputs = generate(loaded(name, method), batch)
    for output, run in zip(outputs, runs, strict=True):
        event(f"finish_reason {run.finish_reason}")
        if run.margin < SAFE_MARGIN:
            event("too close to call")
            continue
        assert_equal(output, run)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llada-gqa"])
@pytest.mark.parametrize("method", ["vanilla", "window"])
def test_llada(name: str, method: str) -> None:
    @QUICK
    @given(requests(name, method))
    def run(batch: list[Request]) -> None:
        compare(name, method, batch)

    run()


@pytest.mark.parametrize("method", ["dream", "vanilla", "window"])
def test_dream(method: str) -> None:
    @QUICK
    @given(requests("tiny-dream", method))
    def run(batch: list[Request]) -> None:
        compare("tiny-dream", method, batch)

    run()


# --- sampling: what was drawn is replayed


@st.composite
def sampled(draw: st.DrawFn, name: str) -> Request:
    max_tokens = draw(st.integers(1, 10))
    kept = draw(rules("vanilla", max_tokens).filter(lambda said: "entropy_bound" not in said))
    kept |= {name: value for name, value in draw(endings(name, max_tokens)).items() if name != "suppress_eos"}
    kept |= {"temperature": draw(st.sampled_from([0.3, 0.8, 1.5])), "seed": draw(st.integers(0, 10**9))}
    kept["temper_confidence"] = draw(st.booleans())
    prompt = draw(st.lists(st.integers(0, 315), min_size=1, max_size=6))
    return prompt, SamplingParams(max_tokens=max_tokens, trajectory=True, **kept)


def replay(name: str, request: Request, output: RequestOutput) -> None:
    """Every returned token was one that the filters keep, on the canvas of its pass, with the reported probability;
    every commit beyond the first of a pass was within the rule."""
    model, (prompt, params), answer = tiny_model(name, LIKED[name][:2]), request, output.outputs[0]
    if answer.finish_reason == "stop":
        return  # tokens behind the end were visible for a while and are not reported
    network, family, start = network_of(model), family_of(model), len(prompt)
    canvas = [*prompt, *[family.mask_id] * (params.max_tokens or 0)]
    events = answer.trajectory or []
    assert sorted(e.position for e in events) == list(range(params.max_tokens or 0))
    assert {e.num_pass for e in events} == set(range(1, answer.num_forward_passes + 1))
    drawn = {e.position: e.token_id for e in events}
    for number in range(1, answer.num_forward_passes + 1):
        logits = network(canvas)
        now = [e for e in events if e.num_pass == number]
        probabilities = []
        for e in now:
            weights_seen: list[Any] = []

            def take(weights: Any, _: int, token: int = e.token_id, seen: list[Any] = weights_seen) -> int:
                seen.append(weights)
                return token

            place = start + e.position
            row = logits[max(0, place - family.shift)]
            prediction = predict(row, place, e.position, family, params, False, take)
            if prediction.gap > SAFE_MARGIN:
                assert weights_seen[0][e.token_id] > 0, "a token that the filters drop"
                assert abs(prediction.probability - e.probability) < PROBABILITY_TOLERANCE
            probabilities.append(e.probability)
        ranked = sorted(probabilities, reverse=True)
        for n, probability in enumerate(ranked[1:], 2):
            if params.threshold is not None:
                assert probability >= params.threshold - PROBABILITY_TOLERANCE
            if params.factor is not None:
                assert probability >= 1 - params.factor / (n + 1) - PROBABILITY_TOLERANCE
        for e in now:
            canvas[start + e.position] = drawn[e.position]


@pytest.mark.parametrize("name", ["tiny-llada-gqa", "tiny-dream"])
def test_sampled_tokens(name: str) -> None:
    @QUICK
    @given(st.lists(sampled(name), min_size=1, max_size=3))
    def run(batch: list[Request]) -> None:
        for request, output in zip(batch, generate(loaded(name, "vanilla"), batch), strict=True):
            replay(name, request, output)

    run()


def test_the_replay_can_fail() -> None:
    """It notices a request that was served without its filter, and tempered probabilities."""
    params = SamplingParams(max_tokens=10, steps=5, temperature=1.5, seed=3, ignore_eos=True, trajectory=True)
    output = generate(loaded("tiny-llada", "vanilla"), [(PROMPT, params)])[0]
    replay("tiny-llada", (PROMPT, params), output)
    for other in (params.replace(top_k=1), params.replace(temper_confidence=True)):
        with pytest.raises(AssertionError):
            replay("tiny-llada", (PROMPT, other), output)


PROMPT = [5, 9, 200, 31]


def test_it_can_fail() -> None:
    """The comparison sees one other token in the prompt, another seat's rule, and a pass too many."""
    params = SamplingParams(max_tokens=8, threshold=0.6, block_length=4, ignore_eos=True, trajectory=True)
    run = oracle("tiny-llada", "vanilla", (PROMPT, params))
    llm = loaded("tiny-llada", "vanilla")
    assert_equal(generate(llm, [(PROMPT, params)])[0], run)
    for request in [
        ([5, 9, 201, 31], params),
        (PROMPT, params.replace(threshold=0.95)),
        (PROMPT, params.replace(threshold=None, steps=4)),
    ]:
        with pytest.raises(AssertionError):
            assert_equal(generate(llm, [request])[0], run)


def test_most_runs_are_compared() -> None:
    """The margin filter does not eat the test."""
    close = 0
    for first in range(40):
        params = SamplingParams(max_tokens=8, threshold=0.6, block_length=4, ignore_eos=True)
        close += oracle("tiny-llada", "vanilla", ([first, 9, 200], params)).margin < SAFE_MARGIN
    assert close <= 4
