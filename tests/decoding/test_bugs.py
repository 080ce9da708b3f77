"""Failures that users of other engines met, one check each; the number is the entry in the collection they come from.

The network is a script (`stubs.Stub`) unless the point is attention, so the numbers in a check are the ones the
network "predicts".
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from decoding.helpers import assert_equal, commits, engine, facts, generate, one, order
from oracles.decoding import decode, family_of, network_of
from oracles.golden import tiny_model
from stubs import EOS, EOT, MASK, Script, Stub, View, table
from unmask import LLM, ConfigError, RequestError, SamplingParams, TokenizerError, UnmaskError

PROMPT = [1, 2, 3]


def answering(cells: Sequence[tuple[int, float]], shift: int = 0, **options: Any) -> LLM:
    """An engine that predicts cells[i] at answer position i after a prompt of three."""
    return engine(Stub(table(3, cells), shift=shift), **options)


def by_first(scripts: Mapping[int, Script]) -> Script:
    """A script for each request, chosen by the first token of its prompt."""
    return lambda view: scripts[view.first](view)


# --- B01: threshold decoding never ends


@pytest.mark.parametrize("method", ["confidence", "vanilla"])
def test_b01_nothing_reaches_the_threshold(method: str) -> None:
    llm = engine(Stub(lambda _: {7: 0.3}), method)
    output = one(llm, PROMPT, max_tokens=8, block_length=4, threshold=0.9, trajectory=True)
    assert output.outputs[0].token_ids == [7] * 8
    assert output.num_forward_passes == 8
    assert commits(output) == [(i, 7, i + 1) for i in range(8)], "one a pass, ties to the leftmost"


def test_b01_one_stuck_row_of_two() -> None:
    stub = Stub(lambda view: {7: 0.3 if view.first == 1 else 0.95})
    params = SamplingParams(max_tokens=8, block_length=4, threshold=0.9, trajectory=True)
    for prompts in ([[1, 2], [5, 5, 5]], [[5, 5, 5], [1, 2]]):
        outputs = generate(engine(stub), [(prompt, params) for prompt in prompts])
        passes = {prompt[0]: output.num_forward_passes for prompt, output in zip(prompts, outputs)}
        assert passes == {1: 8, 5: 2}
        assert all(output.outputs[0].token_ids == [7] * 8 for output in outputs)


# --- B02: what `steps` means


def test_b02_steps_beside_a_threshold_is_refused() -> None:
    for name in ("threshold", "confidence_threshold", "factor", "entropy_bound"):
        with pytest.raises(ConfigError, match=r"steps.*8"):
            SamplingParams(max_tokens=32, block_length=4, steps=8, **{name: 0.9})


def test_b02_threshold_alone_leaves_no_mask() -> None:
    output = one(engine(Stub(lambda _: {7: 0.5})), PROMPT, max_tokens=32, block_length=4, threshold=0.9)
    assert output.outputs[0].token_ids == [7] * 32


@pytest.mark.parametrize("steps", [0, -1])
def test_b02_no_steps(steps: int) -> None:
    with pytest.raises(ConfigError, match="steps"):
        SamplingParams(steps=steps)


def test_b02_fewer_steps_than_blocks() -> None:
    llm = engine(Stub(lambda _: {7: 0.5}))
    with pytest.raises((ConfigError, RequestError), match=r"(?s)4.*8|8.*4") as caught:
        one(llm, PROMPT, max_tokens=32, block_length=4, steps=4)
    assert "steps" in str(caught.value)
    assert "block" in str(caught.value)
    assert one(llm, PROMPT, max_tokens=4, block_length=4, steps=4).outputs[0].token_ids == [7] * 4


@pytest.mark.parametrize(("steps", "passes"), [(12, 12), (8, 8), (9, 9), (32, 32), (31, 31), (40, 32)])
def test_b02_every_block_gets_all_its_tokens(steps: int, passes: int) -> None:
    """12 steps over 8 blocks: two for each of the first four, one for the others."""
    llm = engine(Stub(lambda _: {7: 0.5}))
    output = one(llm, PROMPT, max_tokens=32, block_length=4, steps=steps, trajectory=True)
    assert output.num_forward_passes == passes
    per_block = [{n for i, _, n in commits(output) if i // 4 == block} for block in range(8)]
    shares = [steps // 8 + (block < steps % 8) for block in range(8)]
    assert [len(used) for used in per_block] == [min(share, 4) for share in shares]
    assert output.outputs[0].token_ids == [7] * 32


# --- B03: too many tokens


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("rule", [{"threshold": 0.9}, {"steps": 8}, {}], ids=["threshold", "steps", "default"])
@pytest.mark.parametrize("probability", [0.95, 0.3])
def test_b03_max_tokens_is_exact(max_tokens: int, rule: dict[str, Any], probability: float) -> None:
    stub = Stub(lambda _: {7: probability})
    output = one(engine(stub), PROMPT, max_tokens=max_tokens, block_length=4, **rule)
    assert output.outputs[0].token_ids == [7] * max_tokens
    assert output.outputs[0].finish_reason == "length"
    assert all(call.num_rows == 3 + max_tokens for call in stub.calls), "the canvas is not rounded up"


# --- B04: the end of text


def ending(place: int, surest: bool = False) -> Script:
    def script(view: View) -> Mapping[int, float]:
        i = view.position - 3
        return {EOS if i == place else 10 + i % 20: 0.99 if surest and i == place else 0.9 - 0.001 * max(0, i)}

    return script


def test_b04_later_blocks_are_not_decoded() -> None:
    stub = Stub(ending(2))
    output = one(engine(stub), PROMPT, max_tokens=32, block_length=4, steps=32, trajectory=True)
    assert output.outputs[0].token_ids == [10, 11]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert output.num_forward_passes == len(stub.calls) == 3
    parallel = one(engine(stub), PROMPT, max_tokens=32, block_length=4, threshold=0.5)
    assert (parallel.outputs[0].token_ids, parallel.num_forward_passes) == ([10, 11], 1)


def test_b04_an_early_end_waits_for_what_is_before_it() -> None:
    stub = Stub(ending(2, surest=True))
    output = one(engine(stub), PROMPT, max_tokens=32, block_length=4, steps=32, trajectory=True)
    assert output.outputs[0].token_ids == [10, 11]
    assert output.num_forward_passes == 3
    assert commits(output) == [(0, 10, 2), (1, 11, 3)]
    # from the pass after its commit on, nothing behind the end is even visible
    assert [call.num_rows for call in stub.calls] == [35, 6, 6]


def test_b04_ignore_eos_fills_the_canvas() -> None:
    output = one(engine(Stub(ending(2))), PROMPT, max_tokens=32, block_length=4, steps=32, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 32
    assert output.outputs[0].token_ids[2] == EOS
    assert (output.outputs[0].finish_reason, output.num_forward_passes) == ("length", 32)


def test_b04_the_end_moves_left_never_right() -> None:
    """An end at 5, then one at 2, while 0 and 1 are open; the later prediction of an end at 7 is nothing."""
    cells = [(10, 0.4), (11, 0.3), (EOS, 0.8), (13, 0.2), (14, 0.1), (EOS, 0.9), (16, 0.1), (EOS, 0.7)]
    output = one(answering(cells), PROMPT, max_tokens=8, steps=8, trajectory=True)
    assert output.outputs[0].token_ids == [10, 11]
    assert commits(output) == [(0, 10, 3), (1, 11, 4)]
    assert output.num_forward_passes == 4


def test_b04_two_ends_in_one_pass() -> None:
    cells = [(10, 0.95), (EOS, 0.95), (12, 0.95), (EOS, 0.99)]
    output = one(answering(cells), PROMPT, max_tokens=4, threshold=0.9)
    assert (output.outputs[0].token_ids, output.num_forward_passes) == ([10], 1)


def test_b04_an_end_in_the_prompt_means_nothing() -> None:
    llm = engine(Stub(lambda _: {7: 0.95}))
    assert one(llm, [1, EOS, EOT], max_tokens=4, threshold=0.9).outputs[0].token_ids == [7] * 4


def test_b04_an_end_at_once_is_an_empty_answer() -> None:
    output = one(answering([(EOS, 0.9)] * 4), PROMPT, max_tokens=4, steps=4)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "stop")
    assert output.num_forward_passes == 1
    assert output.tokens_per_pass == 0


# --- B06, B07: holding tokens back


@pytest.mark.parametrize("end", [EOS, EOT])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_b06_end_of_text_last(end: int, temperature: float) -> None:
    llm = answering([(end, 0.9), (10, 0.6)])
    said = {"max_tokens": 2, "steps": 2, "ignore_eos": True, "temperature": temperature, "trajectory": True}
    for seed in range(4):
        output = one(llm, PROMPT, eos_confidence_last=True, seed=seed, **said)
        assert order(output) == [1, 0]
        if temperature == 0:
            assert output.outputs[0].token_ids == [end, 10]
        assert order(one(llm, PROMPT, seed=seed, **said)) == [0, 1], "without the option it comes first"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b07_suppressed_tokens_never_occur(temperature: float) -> None:
    stub = Stub(lambda _: {9: 0.8, 8: 0.15})
    said = {"max_tokens": 8, "temperature": temperature, "suppress_token_ids": [9], "trajectory": True}
    for seed in range(5):
        for rule in ({"steps": 4}, {"threshold": 0.9}):
            output = one(engine(stub), PROMPT, seed=seed, **rule, **said)
            assert 9 not in output.outputs[0].token_ids
            if temperature == 0:
                assert output.outputs[0].token_ids == [8] * 8
                assert output.outputs[0].trajectory[0].probability == pytest.approx(0.75, abs=1e-4), ".15 / (1 - .8)"
    assert all(9 not in canvas.values() for call in stub.calls for canvas in call.sequences)
    assert 9 in one(engine(stub), PROMPT, max_tokens=8, temperature=temperature, seed=0).outputs[0].token_ids


def test_b07_min_tokens_holds_the_end_back() -> None:
    llm = answering([(EOS, 0.9)] * 6)
    for said in ({"min_tokens": 3}, {"min_tokens": 3, "stop_token_ids": [EOS], "ignore_eos": True}):
        answer = one(llm, PROMPT, max_tokens=6, threshold=0.5, **said).outputs[0]
        assert len(answer.token_ids) == 3
        assert not {EOS, EOT, MASK} & set(answer.token_ids)
    assert one(llm, PROMPT, max_tokens=6, threshold=0.5).outputs[0].token_ids == []


def test_b07_suppress_eos() -> None:
    answer = one(answering([(EOS, 0.9)] * 6), PROMPT, max_tokens=6, threshold=0.5, suppress_eos=True).outputs[0]
    assert len(answer.token_ids) == 6
    assert not {EOS, EOT} & set(answer.token_ids)


def test_mask_is_never_predicted_and_stays_in_the_denominator() -> None:
    llm = engine(Stub(lambda _: {MASK: 0.7, 5: 0.2}))
    for temperature in (0.0, 1.0):
        output = one(llm, PROMPT, max_tokens=6, steps=3, temperature=temperature, seed=0, trajectory=True)
        assert MASK not in output.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 6
        for event in output.outputs[0].trajectory:
            expected = 0.2 if event.token_id == 5 else 0.1 / 59
            assert event.probability == pytest.approx(expected, abs=1e-4)


# --- B08, B09: the order must not depend on the temperature, nor break

SPREAD = [(10, 0.95), (11, 0.50), (12, 0.70), (13, 0.60)]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
def test_b08_the_order_does_not_depend_on_the_temperature(temperature: float, alg: str) -> None:
    said = {"max_tokens": 4, "steps": 4, "alg": alg, "seed": 0, "trajectory": True}
    output = one(answering(SPREAD), PROMPT, temperature=temperature, **said)
    assert order(output) == [0, 2, 3, 1]
    assert output.outputs[0].trajectory[0].probability == pytest.approx(0.95, abs=1e-4)


def test_b08_temper_confidence_is_the_reference() -> None:
    """Tempered probabilities saturate to 1, and ties go left."""
    said = {"max_tokens": 4, "steps": 4, "seed": 0, "trajectory": True}
    output = one(answering(SPREAD), PROMPT, temperature=0.01, temper_confidence=True, **said)
    assert order(output) == [0, 1, 2, 3]


def test_b08_threshold_does_not_depend_on_the_temperature() -> None:
    output = one(answering(SPREAD), PROMPT, max_tokens=4, threshold=0.65, temperature=0.01, seed=0, trajectory=True)
    assert [n for _, _, n in commits(output)] == [1, 3, 1, 2]


@pytest.mark.parametrize("rule", [{"steps": 8}, {"steps": 4}, {"threshold": 1.0}, {"entropy_bound": 0.0}])
def test_exact_ties_go_left(rule: dict[str, Any]) -> None:
    output = one(engine(Stub(lambda _: {7: 0.5})), PROMPT, max_tokens=8, trajectory=True, **rule)
    assert order(output) == list(range(8))
    assert [n for _, _, n in commits(output)] == sorted(n for _, _, n in commits(output))


def test_threshold_is_inclusive() -> None:
    """Probability exactly 1 against a threshold of 1."""
    output = one(engine(Stub(lambda _: {7: 1.0})), PROMPT, max_tokens=8, threshold=1.0)
    assert output.num_forward_passes == 1


@pytest.mark.parametrize("alg_temp", [0, 1e-6, 0.1, 0.25, 1, 10])
@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
def test_b09_any_order_temperature(alg_temp: float, alg: str) -> None:
    """Scores of exactly 0 (held-back end of text) and exactly 1 among the others."""
    cells = [(10, 1.0), (EOS, 1.0), (12, 0.7), (13, 0.0), (14, 1.0), (15, 0.5), (EOS, 0.6), (17, 1e-9)]
    llm = answering(cells)
    for temperature in (0.0, 1.0):
        said = {"max_tokens": 8, "ignore_eos": True, "temperature": temperature, "seed": 2}
        for held in (False, True):
            answer = one(llm, PROMPT, steps=5, alg=alg, alg_temp=alg_temp, eos_confidence_last=held, **said).outputs[0]
            assert len(answer.token_ids) == 8
            assert MASK not in answer.token_ids


def test_b09_a_refused_value_harms_nothing() -> None:
    llm = answering(SPREAD)
    before = facts(one(llm, PROMPT, max_tokens=4, steps=4, trajectory=True))
    for value in (-1, float("nan"), float("inf"), "hot"):
        with pytest.raises(ConfigError, match="alg_temp"):
            one(llm, PROMPT, max_tokens=4, steps=4, alg_temp=value)
    assert facts(one(llm, PROMPT, max_tokens=4, steps=4, trajectory=True)) == before


def test_b09_random_orders_are_random() -> None:
    plain, dream = engine(Stub(lambda _: {7: 0.5})), engine(Stub(lambda _: {7: 0.5}, shift=1), "dream")
    rows: list[tuple[LLM, dict[str, Any]]] = [
        (plain, {"remasking": "random"}),
        (plain, {"alg": "maskgit_plus", "alg_temp": 1.0}),
        (dream, {"alg": "origin"}),
    ]
    for llm, said in rows:
        seen = {
            str(commits(one(llm, PROMPT, max_tokens=8, steps=8, seed=seed, trajectory=True, **said)))
            for seed in range(5)
        }
        assert len(seen) == 5, said


@pytest.mark.parametrize(("alg_temp", "share"), [(0.5, 0.69), (10.0, 0.51), (0.05, 1.0)])
def test_b09_orders_follow_the_scores(alg_temp: float, share: float) -> None:
    """Scores .5 and .9: the second comes first with probability e^(.9 / t) / (e^(.9 / t) + e^(.5 / t))."""
    llm = answering([(10, 0.5), (11, 0.9)])
    output = one(llm, PROMPT, max_tokens=2, steps=2, alg_temp=alg_temp, n=400, seed=7, trajectory=True)
    first = sum(commits(output, answer)[1][2] == 1 for answer in range(400)) / 400
    assert first == pytest.approx(share, abs=0.075)  # three standard deviations


# --- B10: Dream's shift


@pytest.mark.parametrize("block_length", [0, 1, 2, 4, 8])
def test_b10_every_position_reads_the_row_before_it(block_length: int) -> None:
    """Block starts included. The script of row r speaks for position r + 1."""
    stub = Stub(lambda view: {view.position: 0.95}, shift=1)
    output = one(engine(stub), PROMPT, max_tokens=8, block_length=block_length, threshold=0.9)
    assert output.outputs[0].token_ids == list(range(3, 11))
    plain = one(engine(Stub(lambda view: {view.position: 0.95})), PROMPT, max_tokens=8, threshold=0.9)
    assert plain.outputs[0].token_ids == list(range(3, 11))


@pytest.mark.parametrize("block_length", [1, 2, 4, 8])
def test_b10_a_network_with_shift_equals_the_oracle(block_length: int) -> None:
    model = tiny_model("tiny-dream")
    for prompt in ([5], [9, 200, 31], [7] * 6):
        params = SamplingParams(
            max_tokens=8, block_length=block_length, threshold=0.7, ignore_eos=True, trajectory=True
        )
        run = decode(network_of(model), family_of(model), prompt, params)
        assert run.margin > 2e-5
        assert_equal(generate(engine(model), [(prompt, params)])[0], run)


def test_b10_a_fixed_block_start_stays() -> None:
    stub = Stub(lambda view: {view.position: 0.95}, shift=1)
    text = [1, 2, 50, MASK, 51, MASK, 52, MASK, MASK]
    answer = engine(stub).infill({"token_ids": text}, SamplingParams(threshold=0.9, block_length=2)).outputs[0]
    assert answer.token_ids == [1, 2, 50, 3, 51, 5, 52, 7, 8]


# --- B11, X3: a threshold is a threshold


def test_b11_no_quota_beside_a_threshold() -> None:
    cells = [(10, 0.95), (11, 0.2), (12, 0.1), (13, 0.05)]
    output = one(answering(cells), PROMPT, max_tokens=4, block_length=4, threshold=0.9, trajectory=True)
    assert commits(output) == [(0, 10, 1), (1, 11, 2), (2, 12, 3), (3, 13, 4)]


def test_b11_budget_and_threshold_together() -> None:
    """Dream's combined rule with a budget of two: only the first is above; what is rejected is tried again."""
    cells = [(10, 0.95), (11, 0.2), (12, 0.1), (13, 0.05)]
    llm = answering(cells, method="dream", shift=1)
    said = {"alg": "confidence_threshold_budget", "steps": 2, "threshold": 0.9, "trajectory": True}
    output = one(llm, PROMPT, max_tokens=4, **said)
    assert commits(output) == [(0, 10, 1), (1, 11, 2), (2, 12, 3), (3, 13, 4)]
    sure = answering([(10, 0.95), (11, 0.94), (12, 0.93), (13, 0.92)], method="dream", shift=1)
    assert commits(one(sure, PROMPT, max_tokens=4, **said)) == [(0, 10, 1), (1, 11, 1), (2, 12, 2), (3, 13, 2)]


@pytest.mark.parametrize("shift", [0, 1])
def test_x3_a_block_start_is_not_privileged(shift: int) -> None:
    """The first position of a block waits for the threshold like any other."""
    cells = [(10 + i, 0.3 if i % 4 == 0 else 0.95) for i in range(8)]
    output = one(answering(cells, shift), PROMPT, max_tokens=8, block_length=4, threshold=0.9, trajectory=True)
    assert [n for _, _, n in commits(output)] == [2, 1, 1, 1, 4, 3, 3, 3]


# --- B14, B15, B16, B18: batches


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llada-gqa", "tiny-dream"])
def test_b14_unequal_prompts(name: str) -> None:
    model = tiny_model(name)
    params = SamplingParams(max_tokens=8, threshold=0.7, block_length=4, ignore_eos=True, trajectory=True)
    prompts = [[9, 60, 200], [5, 17, 88, 131, 204, 250, 31], [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]]
    outputs = generate(engine(model), [(prompt, params) for prompt in prompts])
    for prompt, output in zip(prompts, outputs):
        assert_equal(output, decode(network_of(model), family_of(model), prompt, params))


def test_b14_positions_start_at_zero() -> None:
    stub = Stub(lambda _: {7: 0.95})
    generate(engine(stub), [(prompt, SamplingParams(max_tokens=4, threshold=0.9)) for prompt in ([1], [2] * 5)])
    assert [sorted(canvas) for canvas in stub.calls[0].sequences] == [list(range(5)), list(range(9))]


def test_b15_a_finished_row_is_left_alone() -> None:
    scripts = {4: ending(1), 5: lambda view: {20 + view.position: 0.6}}
    stub = Stub(by_first(scripts))
    params = SamplingParams(max_tokens=12, block_length=4, threshold=0.8, trajectory=True)
    solo = {first: facts(one_of(stub, first, params)) for first in scripts}
    for firsts in ([4, 5], [5, 4]):
        stub.reset()
        outputs = generate(engine(stub), [([first, 0, 0], params) for first in firsts])
        assert {first: facts(output) for first, output in zip(firsts, outputs)} == solo
        last = max(n for n, call in enumerate(stub.calls) if any(c[0] == 4 for c in call.sequences))
        assert last + 1 == solo[4][0][2], "row A runs in its own passes only"
        assert len(stub.calls) == solo[5][0][2] == 12
    assert solo[4][0][1] == [10]
    assert len(solo[5][0][1]) == 12


def one_of(stub: Stub, first: int, params: SamplingParams) -> Any:
    return generate(engine(stub), [([first, 0, 0], params)])[0]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_b16_sampling_in_a_batch(size: int) -> None:
    sets = {first: (10 + 2 * first, 11 + 2 * first) for first in range(5)}
    llm = engine(Stub(lambda view: dict.fromkeys(sets[view.first], 0.49)))
    params = [SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=seed) for seed in range(size)]
    outputs = generate(llm, [([first, 0, 0], params[first]) for first in range(size)])
    for first, output in enumerate(outputs):
        assert len(output.outputs[0].token_ids) == 16
        assert set(output.outputs[0].token_ids) == set(sets[first])


def test_b18_padding_ids_in_a_prompt_are_attended_to() -> None:
    model = tiny_model("tiny-llada")
    end = model.config.eos_token_ids[0]
    assert end == model.config.pad_token_id
    params = SamplingParams(max_tokens=6, steps=6, block_length=0, trajectory=True)
    prompt = [5, end, 6, end, 7]
    llm = engine(model)
    alone, together = (
        one(llm, prompt, max_tokens=6, steps=6, block_length=0, trajectory=True),
        generate(llm, [(prompt, params), (list(range(20)), params)]),
    )
    assert facts(together[0]) == facts(alone)
    assert_equal(alone, decode(network_of(model), family_of(model), prompt, params))
    changed = generate(llm, [([5, end, 6, 8, 7], params)])[0]
    probabilities = [[e.probability for e in o.outputs[0].trajectory] for o in (alone, changed)]
    assert probabilities[0] != probabilities[1]
    assert alone.outputs[0].token_ids


# --- B20, B21: threads and seeds


def test_b20_threads_share_one_engine() -> None:
    model = tiny_model("tiny-llada")
    llm = engine(model, max_num_seqs=4)
    rule = {"threshold": 0.7, "block_length": 4, "ignore_eos": True, "trajectory": True}
    jobs = [([n * 7 % 300] * (1 + n % 5), SamplingParams(max_tokens=2 + n % 6, **rule)) for n in range(16)]
    baseline = [facts(generate(llm, [job])[0]) for job in jobs]
    wrong: list[str] = []

    def client(number: int) -> None:
        for turn in range(5):
            place = (number * 3 + turn * 5) % 16
            try:
                if turn % 2:
                    chunks = list(llm.stream({"prompt_token_ids": jobs[place][0]}, jobs[place][1]))
                    got = facts(chunks[-1].output)
                else:
                    got = facts(generate(llm, [jobs[place]])[0])
                if got != baseline[place]:
                    wrong.append(f"thread {number}, prompt {place}: {got}")
            except Exception as error:
                wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert [facts(output) for output in generate(llm, jobs)] == baseline


def flat(_: View) -> Mapping[int, float]:
    return dict.fromkeys(range(50), 1 / 50)


def test_b21_several_answers_differ() -> None:
    llm = engine(Stub(flat))
    said = {"max_tokens": 16, "steps": 4, "temperature": 1.0}
    answers = one(llm, PROMPT, n=4, **said).outputs
    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    assert len({tuple(one(llm, PROMPT, **said).outputs[0].token_ids) for _ in range(4)}) > 1
    seeded = [[answer.token_ids for answer in one(llm, PROMPT, n=4, seed=1, **said).outputs] for _ in range(2)]
    assert len({tuple(ids) for ids in seeded[0]}) == 4
    assert seeded[0] == seeded[1]


def test_b21_positions_and_passes_draw_afresh() -> None:
    """One seed, a flat network: neither one token everywhere, nor the same row of tokens in every pass."""
    llm = engine(Stub(flat))
    for steps in (1, 16):
        ids = one(llm, PROMPT, max_tokens=16, steps=steps, temperature=1.0, seed=5).outputs[0].token_ids
        assert len(set(ids)) > 6


def test_b21_draws_follow_the_distribution() -> None:
    """.5, .3, .2 over 600 draws, and the same at temperature .5 squared and renormalised."""
    stub = Stub(lambda _: {1: 0.5, 2: 0.3, 3: 0.2})
    llm = engine(stub, max_model_len=210)
    for temperature, expected in ((1.0, (0.5, 0.3, 0.2)), (0.5, (0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38))):
        ids: list[int] = []
        for seed in range(3):
            ids += one(llm, [0], max_tokens=200, steps=1, temperature=temperature, seed=seed).outputs[0].token_ids
        shares = [ids.count(token) / len(ids) for token in (1, 2, 3)]
        assert shares == pytest.approx(expected, abs=0.07)  # 3.4 standard deviations
        assert sum(shares) == 1


# --- filters


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 1}, {1}),
        ({"top_p": 0.7}, {1, 2}),
        ({"top_p": 0.3}, {1}),
        ({"min_p": 0.6}, {1, 2}),
        ({"min_p": 0.4}, {1, 2, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_p": 0.95, "top_k": 3, "min_p": 0.6}, {1, 2}),
        ({}, {1, 2, 3, 4}),
    ],
)
def test_filters_keep_what_they_should(said: dict[str, Any], allowed: set[int]) -> None:
    llm = engine(Stub(lambda _: {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}))
    output = one(llm, PROMPT, max_tokens=60, steps=1, temperature=1.0, seed=3, trajectory=True, **said)
    assert set(output.outputs[0].token_ids) == allowed
    kept = sum({1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}[token] for token in allowed)
    for event in output.outputs[0].trajectory:
        expected = {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}[event.token_id] / kept
        assert event.probability == pytest.approx(expected, abs=1e-4)


# --- guidance


def test_guidance_masks_the_prompt() -> None:
    """u + (w + 1)(c - u) in logits: .6 against .3 with w = 1 is proportional to .6^2 / .3, .2^2 / .2, ..."""

    def script(view: View) -> Mapping[int, float]:
        return {7: 0.3, 8: 0.5, 9: 0.2} if view.first == MASK else {7: 0.6, 8: 0.3, 9: 0.1}

    stub = Stub(script)
    output = one(engine(stub), PROMPT, max_tokens=2, steps=2, cfg_scale=1.0, trajectory=True)
    mixed = {7: 0.36 / 0.3, 8: 0.09 / 0.5, 9: 0.01 / 0.2}
    assert output.outputs[0].token_ids == [7, 7]
    for event in output.outputs[0].trajectory:
        assert event.probability == pytest.approx(mixed[7] / sum(mixed.values()), abs=1e-3)
    assert output.num_forward_passes == 2, "a guided pass is one pass"
    assert output.num_rows == 2 * 2 * 5
    rows = [sorted(canvas[0] == MASK for canvas in call.sequences) for call in stub.calls]
    assert rows in ([[False, True]] * 2, [[False], [True]] * 2, [[True], [False]] * 2)


# --- B44: why it ended


@pytest.mark.parametrize(
    ("place", "max_tokens", "reason", "length"),
    [
        (2, 8, "stop", 2),
        (3, 4, "stop", 3),
        (7, 8, "stop", 7),
        (8, 8, "length", 8),
        (3, 3, "length", 3),
        (0, 1, "stop", 0),
    ],
)
@pytest.mark.parametrize("rule", [{"threshold": 0.5}, {"steps": 8}])
def test_b44_finish_reasons(place: int, max_tokens: int, reason: str, length: int, rule: dict[str, Any]) -> None:
    """Inside; exactly the last; none; only in what a whole last block would have held."""
    answer = one(engine(Stub(ending(place))), PROMPT, max_tokens=max_tokens, block_length=4, **rule).outputs[0]
    assert (answer.finish_reason, len(answer.token_ids), answer.stop_reason) == (reason, length, None)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_b44_stop_ids(ignore_eos: bool) -> None:
    llm = answering([(10, 0.9), (11, 0.8), (12, 0.7), (13, 0.6)])
    said = {"max_tokens": 4, "steps": 4, "ignore_eos": ignore_eos}
    answer = one(llm, PROMPT, stop_token_ids=[30, 12], **said).outputs[0]
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([10, 11], "stop", 12)
    assert answer.num_forward_passes == 3
    assert one(llm, PROMPT, stop_token_ids=[30], **said).outputs[0].finish_reason == "length"


# --- X1 and other bad input


def test_x1_mask_in_the_prompt() -> None:
    llm = engine(Stub(lambda _: {7: 0.95}))
    with pytest.raises(RequestError, match=r"(?i)mask"):
        one(llm, [5, MASK, 6], max_tokens=4, threshold=0.9)
    answer = llm.infill({"token_ids": [5, MASK, 6]}, SamplingParams(threshold=0.9)).outputs[0]
    assert answer.token_ids == [5, 7, 6]


GOOD = {"prompt_token_ids": PROMPT}
BAD: dict[str, tuple[Any, str]] = {
    "empty": ({"prompt_token_ids": []}, "(?i)empty|no token|at least"),
    "mask": ({"prompt_token_ids": [1, MASK]}, "(?i)mask"),
    "above": ({"prompt_token_ids": [1, 64]}, "64"),
    "negative": ({"prompt_token_ids": [1, -3]}, "-3"),
    "long": ({"prompt_token_ids": [1] * 70}, r"(?s)70.*64|64.*70"),
    "too-long-together": ({"prompt_token_ids": [1] * 61}, r"64"),
    "no-list": ({"prompt_token_ids": 5}, "(?i)prompt_token_ids|token ids|list"),
    "no-ints": ({"prompt_token_ids": [1, "a"]}, "(?i)'a'|integer|token id"),
    "no-key": ({"prompt_tokens": [1]}, "prompt_token"),
    "number": (5, "(?i)prompt"),
    "none": (None, "(?i)prompt"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_names_itself_and_harms_nothing(kind: str) -> None:
    """Alone, and as the second of three: the message names the index; nothing of the call is left behind."""
    bad, message = BAD[kind]
    stub = Stub(lambda _: {7: 0.3})
    llm = engine(stub, max_model_len=64)
    params = SamplingParams(max_tokens=4, threshold=0.9, trajectory=True)
    before = facts(llm.generate([GOOD], params)[0])
    with pytest.raises(RequestError, match=message):
        llm.generate([bad], params)
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate([GOOD, bad, GOOD], params)
    assert "1" in str(caught.value)
    stub.calls.clear()
    assert facts(llm.generate([GOOD], params)[0]) == before
    assert [call.num_rows for call in stub.calls] == [7] * 4, "nothing of the refused call still runs"


def test_a_pass_that_fails_harms_its_own_call_only() -> None:
    """The error that the network raised comes out as it is, and the next call finds a whole engine."""
    failing: list[int] = []

    def before(call: int) -> None:
        if call in failing:
            raise FloatingPointError("the network failed")

    stub = Stub(lambda _: {7: 0.3}, before=before)
    llm = engine(stub, max_num_seqs=2)
    params = SamplingParams(max_tokens=4, threshold=0.9, trajectory=True)
    baseline = facts(llm.generate([GOOD], params)[0])
    for failure in range(5):  # more often than there are seats
        stub.calls.clear()
        failing[:] = [failure % 3]
        with pytest.raises(FloatingPointError, match="the network failed"):
            llm.generate([GOOD] * 3, params)
        failing.clear()
        stub.calls.clear()
        assert facts(llm.generate([GOOD], params)[0]) == baseline
        assert [call.num_rows for call in stub.calls] == [7] * 4, "nothing of the failed call still runs"


def test_b36_the_limit_is_exact() -> None:
    """Prompt and answer together, without rounding to blocks; without max_tokens, what is left."""
    llm = engine(Stub(lambda _: {7: 0.95}), max_model_len=64)
    rule = {"threshold": 0.9, "block_length": 8}
    assert one(llm, [1] * 57, max_tokens=7, **rule).outputs[0].token_ids == [7] * 7
    assert len(one(llm, [1] * 60, **rule).outputs[0].token_ids) == 4
    with pytest.raises(RequestError, match=r"(?s)57.*64") as caught:
        one(llm, [1] * 57, max_tokens=8, **rule)
    assert "8" in str(caught.value)


def test_guidance_needs_two_seats() -> None:
    """Refused before anything runs, not hung."""
    llm = engine(Stub(lambda _: {7: 0.95}), max_num_seqs=1)
    with pytest.raises(UnmaskError, match="max_num_seqs"):
        one(llm, PROMPT, max_tokens=4, threshold=0.9, cfg_scale=1.0)
    assert one(llm, PROMPT, max_tokens=4, threshold=0.9).outputs[0].token_ids == [7] * 4


def test_more_answers_than_seats() -> None:
    answers = one(
        engine(Stub(flat), max_num_seqs=2), PROMPT, max_tokens=6, steps=3, temperature=1.0, n=5, seed=4
    ).outputs
    wide = one(engine(Stub(flat)), PROMPT, max_tokens=6, steps=3, temperature=1.0, n=5, seed=4).outputs
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wide]
    assert [answer.index for answer in answers] == [0, 1, 2, 3, 4]


def test_text_without_a_tokenizer() -> None:
    llm = engine(Stub(lambda _: {7: 0.95}))
    for prompt in ("hello", ["hello"], [{"messages": [{"role": "user", "content": "hello"}]}]):
        with pytest.raises(UnmaskError) as caught:
            llm.generate(prompt, SamplingParams(max_tokens=4))
        assert isinstance(caught.value, (TokenizerError, RequestError))
        assert "tokenizer" in str(caught.value)


def test_parameters_must_match_the_prompts() -> None:
    llm = engine(Stub(lambda _: {7: 0.95}))
    params = SamplingParams(max_tokens=4)
    for given in ([params], [params] * 3, []):
        with pytest.raises(UnmaskError, match=r"2"):
            llm.generate([GOOD, GOOD], given)


def test_no_prompts_no_answers() -> None:
    assert engine(Stub(lambda _: {7: 0.95})).generate([], SamplingParams(max_tokens=4)) == []


def test_unknown_options_offer_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"treshold.*threshold"):
        SamplingParams(treshold=0.9)
    with pytest.raises(ConfigError, match=r"max_num_seq\b.*max_num_seqs"):
        engine(Stub(lambda _: {7: 0.95}), max_num_seq=3)
    with pytest.raises(ConfigError, match=r"confidense.*confidence"):
        engine(Stub(lambda _: {7: 0.95}), method="confidense")
    with pytest.raises(ConfigError, match="maskgit_plus"):
        SamplingParams(alg="maskgit-plus")


@pytest.mark.parametrize(
    "said",
    [
        {"block_length": -1},
        {"block_length": 2.5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -1},
        {"top_k": -2},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"n": 0},
        {"cfg_scale": -1},
        {"threshold": -0.1},
        {"seed": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop_token_ids": [-1]},
        {"stop": [""]},
        {"threshold": 0.9, "factor": 1.0},
        {"alg": "entropy", "remasking": "random"},
    ],
    ids=str,
)
def test_values_out_of_range_name_their_field(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**said)
    assert next(iter(said)) in str(caught.value)


@pytest.mark.parametrize("name", ["stop_token_ids", "suppress_token_ids"])
def test_ids_outside_the_vocabulary(name: str) -> None:
    """In a stop or suppress list they are refused by name, or mean nothing; the engine goes on either way."""
    llm = engine(Stub(lambda _: {7: 0.95}))
    try:
        answer = one(llm, PROMPT, max_tokens=4, threshold=0.9, **{name: [1000]}).outputs[0]
    except UnmaskError as error:
        message: str | None = str(error)
    else:
        message = None
        assert answer.token_ids == [7] * 4
    assert message is None or "1000" in message
    assert one(llm, PROMPT, max_tokens=4, threshold=0.9).outputs[0].token_ids == [7] * 4
