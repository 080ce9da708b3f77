"""The oracle of the drift caches itself: against the published code's outputs, against the paper's form written with
arrays, and against what the methods promise."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from oracles.decoding import Prediction, blocks_of, dream_curve, family_of, num_adaptive, predict, score_of, spread
from oracles.drift import (
    CURVES,
    DLLM_CACHE,
    NEVER,
    PAPER,
    DriftNetwork,
    DriftSettings,
    budget,
    decode,
    paper_curve,
    released_curve,
    singular_proxy,
    value_weight,
)
from oracles.flash import made_up_prompt
from oracles.golden import tiny_model
from unmask import ops
from unmask.config import SamplingParams
from unmask.models.attention import DenseContext
from unmask.models.transformer import Transformer

# D hidden size, H query heads, Hkv key heads, hd head size, N positions, G of them the answer, r rank, V vocabulary

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MODELS = ("tiny-llada", "tiny-llada-gqa", "tiny-dream")
FIRST_TOKEN, LAST_CANDIDATE = "the first answer position from its own row", "the last candidate though it fails"
REFUSED = {
    "spa-dream-2": FIRST_TOKEN,
    "spa-dream-4": FIRST_TOKEN,
    "spa-llada-7": LAST_CANDIDATE,
    "spa-llada-10": LAST_CANDIDATE,
}
"""Cases that hold a bug of SPA-Cache's released code: only with the bug are they reproduced."""


def cases(*families: str) -> list[Any]:
    found = [one for family in families for one in json.loads((GOLDEN / f"{family}.json").read_text())["cases"]]
    return [pytest.param(one, id=one["id"]) for one in found]


SPA, DLLM = cases("spa_llada", "spa_dream"), cases("dllm_cache_llada", "dllm_cache_dream")


def settings_of(case: dict[str, Any], **changes: object) -> DriftSettings:
    said = case["settings"]
    if "transfer_ratio" in said:
        known = {
            **DLLM_CACHE,
            "ratio": said["transfer_ratio"],
            "full_every": said["prompt_interval_steps"],
            "answer_every": said["gen_interval_steps"],
        }
    else:
        known = {
            "rank": said["proxy_rank"],
            "ratio": tuple(said["update_ratio"]),
            "full_every": said["refresh_steps"],
            "answer_every": said["refresh_gen_steps"],
            "warmup": said["n_warmup_steps"],
        }
    return DriftSettings(**{**known, **changes})  # type: ignore[arg-type]


def published_run(case: dict[str, Any], network: DriftNetwork, last_candidate: bool) -> tuple[list[int], list[Any]]:
    """The references' loops around a network: their schedules (a step without a commit is a pass), what SPA-Cache does
    behind an end of text, and its bug in the factor's rule. The answer, and the commits of each pass."""
    said, prompt = case["settings"], case["prompt_ids"]
    mask, start, length = said["mask_token_id"], len(prompt), said["gen_length"]
    canvas, family = [*prompt, *[mask] * length], family_of(network.model)
    spa, threshold, factor = "proxy_rank" in said, said.get("threshold"), said.get("dynamic_threshold_factor")
    adaptive = {name: value for name, value in (("threshold", threshold), ("factor", factor)) if value is not None}
    params = SamplingParams(
        max_tokens=length,
        alg=said.get("alg"),
        **(adaptive or {"steps": said["steps"]}),  # type: ignore[arg-type]
    )
    blocks = blocks_of(start, start + length, said["block_length"])
    commits: list[Any] = []

    def pass_over(block: range, quota: int) -> None:
        masked = [i for i in block if canvas[i] == mask]
        logits = network(canvas)
        found = [predict(logits[i - family.shift], i, i - start, family, params, False, None) for i in masked]
        ranked: list[Prediction] = sorted(found, key=lambda one: (-score_of(one, params), one.position))
        if threshold is not None:
            quota = max(1, sum(one.probability >= threshold for one in ranked))
        elif factor is not None:
            quota = num_adaptive(ranked, params) or 0
            quota += last_candidate and quota == len(ranked) - 1
        before = list(canvas)
        for one in ranked[:quota]:
            canvas[one.position] = one.token_id
        if spa and len(network.passes) % said["early_stop_steps"] == 0:
            ended = [i for i in range(start, len(canvas)) if canvas[i] in (said["eot_id"], said["pad_id"])]
            if ended:
                canvas[ended[0] + 1 :] = [said["pad_id"]] * (len(canvas) - ended[0] - 1)
        filled = [i for i in range(start, len(canvas)) if before[i] == mask != canvas[i]]
        commits.append([(i - start, canvas[i]) for i in filled])

    for block, share in zip(blocks, spread(said["steps"], len(blocks))):
        masks = sum(canvas[i] == mask for i in block)
        if "alg" in said:
            plan, left = [], masks
            times = torch.linspace(1, 1e-3, share + 1)
            for step in range(share):
                quota = int(torch.tensor(float(left)) * (1 - times[step + 1] / times[step]))
                plan.append(left if step == share - 1 else max(quota, int(spa)))
                left -= plan[-1]
            assert spa or plan == dream_curve(masks, share, 1e-3)
        else:
            plan = spread(masks, share)
        for quota in plan if not adaptive else [0] * masks:
            if any(canvas[i] == mask for i in block):
                pass_over(block, quota)
    return canvas[start:], commits


def published(case: dict[str, Any], bugs: bool, **changes: object) -> tuple[list[int], list[Any], DriftNetwork]:
    network = DriftNetwork(tiny_model(case["model"]), len(case["prompt_ids"]), settings_of(case, **changes))
    return *published_run(case, network, bugs), network


def check(case: dict[str, Any], bugs: bool, **changes: object) -> None:
    """Everything that a case holds."""
    output, commits, network = published(case, bugs, **changes)
    start = len(case["prompt_ids"])
    assert commits == [sorted(zip(step["pos"], step["tok"])) for step in case["steps"]]
    assert output == case["output_ids"]
    assert len(network.passes) == case["nfe"]
    if "step_kinds" in case:
        assert [one.kind for one in network.passes] == case["step_kinds"]
    if "selected" in case:
        chosen = [
            {"step": step, "layer": number, "rows": [i - start for i in layer.chosen]}
            for step, one in enumerate(network.passes)
            for number, layer in enumerate(one.layers)
            if layer.chosen
        ]
        assert chosen == case["selected"]
    gaps = [layer.gap for one in network.passes for layer in one.layers]
    published_gap = case["gaps"].get("proxy_cos", case["gaps"].get("value_cos"))
    assert min([1.0, *gaps]) == pytest.approx(published_gap, abs=3e-6)


# --- the published code


@pytest.mark.parametrize("case", [one for one in SPA if one.id not in REFUSED])
def test_spa_cache(case: dict[str, Any]) -> None:
    check(case, bugs=False)


@pytest.mark.parametrize("case", DLLM)
def test_dllm_cache(case: dict[str, Any]) -> None:
    check(case, bugs=False)


@pytest.mark.parametrize("case", [one for one in SPA if one.id in REFUSED])
def test_refused_cases_are_their_bug_and_nothing_else(case: dict[str, Any]) -> None:
    check(case, bugs=True, first_row="own")
    switched_off = {"bugs": False} if REFUSED[case["id"]] == LAST_CANDIDATE else {"bugs": True}
    assert published(case, **switched_off)[1] != [sorted(zip(step["pos"], step["tok"])) for step in case["steps"]]
    assert case.get("affected_by_first_token_bug", case.get("factor_last_candidate_quirk"))


def test_every_case_is_held() -> None:
    assert len(SPA) == 21
    assert len(DLLM) == 10
    marked = {one.id for one in SPA if one.values[0].get("affected_by_first_token_bug")}
    marked |= {one.id for one in SPA if one.values[0].get("factor_last_candidate_quirk")}
    assert marked == set(REFUSED)


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_a_full_and_a_partial_pass(name: str) -> None:
    (case,) = json.loads((GOLDEN / f"spa_proxy_{name}.json").read_text())["cases"]
    want = load_file(GOLDEN / f"spa_proxy_{name}.safetensors")
    model, start = tiny_model(case["model"]), len(case["prompt_ids"])
    for number in range(3):
        ours, theirs = (
            singular_proxy(value_weight(model, number), case["proxy_rank"]),
            want[f"layer{number}.proxy_weight"],
        )
        torch.testing.assert_close(ours.T @ ours, theirs.T @ theirs, atol=1e-5, rtol=1e-5)
    settings = DriftSettings(rank=case["proxy_rank"], ratio=tuple(case["update_ratio"]))
    network = DriftNetwork(model, start, settings)
    close = functools.partial(torch.testing.assert_close, atol=1e-3, rtol=1e-4)
    close(network(case["full_step_ids"]), want["logits_full_step"])
    close(network(case["partial_step_ids"])[start:], want["logits_partial_step_gen_rows"])
    for number in (1, 2):
        log = network.passes[1].layers[number]
        cosines = torch.tensor(list(log.drift.values()))
        torch.testing.assert_close(cosines, want[f"layer{number}.cos"], atol=2e-6, rtol=0)
        selected = case["selected_partial_step"][str(number)]
        assert [i - start for i in log.chosen] == selected["rows"]
        assert log.gap == pytest.approx(selected["gap"], abs=3e-6)


# --- budgets


@pytest.mark.parametrize("case", cases("spa_budget"))
def test_budgets(case: dict[str, Any]) -> None:
    if "curve" in case:
        c = case["curve"]
        edges = [c["scale"] * c[f"freq_{where}"] for where in ("start", "peak", "end")]
        ratios = released_curve(c["n_layers"], c["peak_pos"], *edges, c["freq_min"])
    elif case["update_ratio_dist"] == "uniform":
        ratios = [case["max_update_ratio"]] * CURVES[case["model"]][0]
    else:
        most, average = case["max_update_ratio"], case["avg_update_ratio"]
        ratios = budget(case["model"], most=most, average=average, least=case["min_update_ratio"])
    assert ratios == pytest.approx(case["ratio"], abs=1e-12)
    for length, want in case.get("k", {}).items():
        assert [int(int(length) * one) for one in ratios] == want


@pytest.mark.parametrize("name", CURVES)
def test_the_papers_curve_is_exact_where_the_released_one_is_not(name: str) -> None:
    num_layers, at, start, peak, end = CURVES[name]
    top = round(at * num_layers)
    ratios = paper_curve(num_layers, top, start, peak, end)
    assert (ratios[0], ratios[top - 1], ratios[-1]) == pytest.approx((start, peak, end))
    assert max(ratios) == pytest.approx(peak)
    assert released_curve(num_layers, at, start, peak, end, 0.0)[-1] > end + 0.005


# --- one pass after another, on canvases that do not depend on the scores


@functools.cache
def double_model(name: str) -> Transformer:
    return tiny_model(name, dtype=torch.float64)


def canvases(model: Transformer, num: int, length: int = 16, each: int = 1) -> tuple[int, list[list[int]]]:
    """The prompt's length, and a canvas that gets `each` made-up tokens a pass, from places all over the answer."""
    prompt, mask = made_up_prompt(9, 3), model.config.mask_token_id
    canvas, out = [*prompt, *[mask] * length], []
    for number in range(num):
        out.append(list(canvas))
        for i in range(number * each, (number + 1) * each):
            canvas[len(prompt) + (7 * i + 3) % length] = (53 * i + 11) % 300
    return len(prompt), out


@torch.inference_mode()
def uncached(model: Transformer, canvas: Sequence[int]) -> Tensor:
    context = DenseContext(torch.arange(len(canvas)), rope=model.rope)
    return model.logits(model(torch.tensor([list(canvas)]), context))[0]


def feed(model: Transformer, num: int = 9, each: int = 1, **settings: Any) -> tuple[list[Tensor], DriftNetwork]:
    """The logits that the answer is predicted by, [G, V] of each pass."""
    start, seen = canvases(model, num, each=each)
    network = DriftNetwork(model, start, DriftSettings(**{"rank": 8, "ratio": 0.3, **settings}))
    first = start - model.config.logit_shift
    return [network(one)[first : first + 16] for one in seen], network


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-8, rtol=1e-8)


OFTEN = {"full_every": 6, "answer_every": 3}
"""Passes 0 and 6 are full, pass 3 refreshes the answer."""
UNEQUAL = {"first_row": "stream", "together": False, "full_every": 4, "answer_every": 3}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("changes", [{}, PAPER, DLLM_CACHE], ids=["released", "paper", "dllm"])
def test_refreshing_everything_is_the_uncached_run(name: str, changes: dict[str, Any]) -> None:
    model = double_model(name)
    start, seen = canvases(model, 5)
    first = start - model.config.logit_shift
    want = [uncached(model, one)[first : first + 16] for one in seen]
    always = {"full_every": 1, "answer_every": 1}
    found, network = feed(model, 5, **{**changes, **always})
    assert all(map(same, found, want))
    assert {one.kind for one in network.passes} == {"full"}
    assert network.passes[-1].num_rows == 25
    rarer, network = feed(model, 5, **{**changes, **always, "full_every": 2})
    assert [same(a, b) for a, b in zip(rarer, want)] == [True, False, True, False, True]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("identifier", "kv"),
    [("value", "values"), ("proxy", "dense"), ("proxy", "sparse"), ("input", "sparse"), ("attention", "values")],
)
def test_a_ratio_of_one_is_a_refresh_of_the_answer(name: str, identifier: str, kv: str) -> None:
    model, other = double_model(name), {"identifier": identifier, "kv": kv, "full_every": None}
    always, _ = feed(model, 4, **other, answer_every=1)
    for more in ({}, {"reuse": "absolute"}, {"store": "scatter_selected"}, {"layer0": "gen_only"}):
        for answer_every in (None, 2):
            found, network = feed(model, 4, **other, **more, ratio=1.0, answer_every=answer_every)
            assert all(map(same, found, always))
            assert network.passes[1].kind == "partial"
    assert not all(map(same, feed(model, 4, **other, ratio=0.9)[0], always))


@pytest.mark.parametrize("name", MODELS)
def test_a_ratio_of_one_over_all_positions_is_the_uncached_run(name: str) -> None:
    model = double_model(name)
    start, seen = canvases(model, 5)
    first = start - model.config.logit_shift
    want = [uncached(model, one)[first : first + 16] for one in seen]
    for layer0 in ("full", "sparse"):
        for reuse in ("delta", "absolute"):
            everything = {"region": "all", "layer0": layer0, "reuse": reuse, "kv": "sparse", **NEVER}
            assert all(map(same, feed(model, 5, **everything, ratio=1.0)[0], want))
            assert [same(a, b) for a, b in zip(feed(model, 5, **everything, ratio=0.9)[0], want)].count(True) == 1
    answer_only = feed(model, 5, ratio=1.0, **NEVER)[0]
    assert [same(a, b) for a, b in zip(answer_only, want)] == [True] + [False] * 4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "changes",
    [{"kv": "sparse"}, {"kv": "values"}, {"reuse": "absolute"}, {"layer0": "sparse"}, {"identifier": "input"}],
    ids=str,
)
def test_switches_of_partial_passes_are_equal_on_refreshes_only(name: str, changes: dict[str, Any]) -> None:
    model = double_model(name)
    base, network = feed(model, **OFTEN)
    kinds = [one.kind for one in network.passes]
    assert kinds == ["full", "partial", "partial", "gen", "partial", "partial", "full", "partial", "partial"]
    found = feed(model, **{**OFTEN, **changes})[0]
    agree = [same(a, b) for a, b in zip(found, base)]
    assert all(agree[number] for number in (0, 3, 6))
    if "identifier" in changes:
        assert not all(agree)  # it may choose the same rows
    else:
        assert not any(agree[number] for number in (2, 5, 8))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_of_rows_that_were_not_computed(name: str) -> None:
    """Both stores choose the same rows right after a refresh, and measure other drifts from then on."""
    model = double_model(name)
    runs = {store: feed(model, store=store, **OFTEN)[1] for store in ("overwrite_all", "scatter_selected")}
    a, b = ([one.layers[1].drift for one in run.passes] for run in runs.values())
    assert [x.keys() == y.keys() for x, y in zip(a, b)] == [True] * 9
    for number in (1, 4, 7):
        assert a[number] == pytest.approx(b[number], abs=1e-12)
        assert a[number + 1] != pytest.approx(b[number + 1], abs=1e-6)
        computed = runs["scatter_selected"].passes[number].layers[1].chosen
        assert [b[number + 1][i] for i in computed] == pytest.approx([a[number + 1][i] for i in computed], abs=1e-2)


# --- exact savings


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "changes",
    [
        OFTEN,
        {**OFTEN, "first_row": "live"},
        {**OFTEN, "first_row": "own", "reuse": "absolute", "kv": "sparse"},
        {**UNEQUAL, "identifier": "value", "kv": "values"},
        {**NEVER, "store": "scatter_selected", "warmup": 2, "force_new": "union"},
    ],
    ids=str,
)
def test_the_first_layer_of_the_answer_alone_is_exact(name: str, changes: dict[str, Any]) -> None:
    model = double_model(name)
    full, slow = feed(model, **changes)
    found, fast = feed(model, **changes, layer0="gen_only")
    assert all(map(same, found, full))
    extra = model.config.logit_shift * (changes.get("first_row") in ("stream", "live"))
    for a, b in zip(slow.passes, fast.passes):
        assert a.kind == b.kind
        assert [one.chosen for one in a.layers] == [one.chosen for one in b.layers]
        assert len(a.layers[0].rows) == 25
        assert len(b.layers[0].rows) == (25 if b.kind in ("full", "prompt") else 16 + extra)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_not_exact_if_the_prompt_is_scored(name: str) -> None:
    model = double_model(name)
    full, found = (feed(model, region="all", layer0=one, **NEVER)[0] for one in ("full", "gen_only"))
    assert [same(a, b) for a, b in zip(found, full)].count(True) == 1


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_undecided_positions_are_enough(name: str) -> None:
    model = tiny_model(name)
    prompt = made_up_prompt(10, 1)
    params = SamplingParams(max_tokens=20, block_length=10, threshold=0.7)
    runs = [decode(model, prompt, params, DriftSettings(rank=8, head=one, **OFTEN)) for one in ("all", "masked")]
    assert runs[0].run == runs[1].run
    full, found = (feed(model, head=one, **OFTEN)[0] for one in ("all", "masked"))
    for number, (a, b) in enumerate(zip(full, found)):
        asked = ~b.isnan().any(1)
        assert int(asked.sum()) == 16 - number
        torch.testing.assert_close(a[asked], b[asked])


# --- what the method promises


@pytest.mark.parametrize("name", MODELS)
def test_a_proxy_of_full_rank_ranks_as_the_values_without_bias(name: str) -> None:
    model = copy.deepcopy(double_model(name))
    if model.config.qkv_bias:
        biased = feed(model, identifier="value", ratio=0.5)[1]
        for layer in model.layers:
            layer.attn.qkv.bias.data[-model.config.num_kv_heads * model.config.head_dim :] = 0  # type: ignore
        values = feed(model, identifier="value", ratio=0.5)[1]
        assert biased.passes[1].layers[1].drift != pytest.approx(values.passes[1].layers[1].drift, abs=1e-6)
    values, full, small = (
        feed(model, ratio=0.5, **one)[1] for one in ({"identifier": "value"}, {"rank": 1}, {"rank": 2})
    )
    for a, b in zip(values.passes, full.passes):
        assert [one.chosen for one in a.layers] == [one.chosen for one in b.layers]
        for one, other in zip(a.layers, b.layers):
            assert one.drift == pytest.approx(other.drift, abs=1e-9)
    assert [one.layers[1].chosen for one in values.passes] != [one.layers[1].chosen for one in small.passes]


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_drift_of_inputs_and_of_attention_outputs(name: str) -> None:
    model = double_model(name)
    _, network = feed(model, 3, identifier="input", **NEVER)
    before, now = network.passes[1].streams, network.passes[2].streams
    for number in (1, 2):
        normed = [model.layers[number].attn_norm(torch.stack(one[number])) for one in (before, now)]  # type: ignore
        cosines = F.cosine_similarity(*normed, dim=1)[9:].tolist()
        assert list(network.passes[2].layers[number].drift.values()) == pytest.approx(cosines, abs=1e-9)
    for kv in ("dense", "values", "sparse"):
        _, network = feed(model, 2, identifier="attention", kv=kv, **NEVER)
        for number in (1, 2):
            layer, memory = model.layers[number], network.memory[number]
            chosen = network.passes[1].layers[number].chosen
            x, mark, delta = (
                torch.stack([plane[i] for i in chosen])
                for plane in (network.passes[1].streams[number], memory.mark, memory.delta)
            )
            one_look = mark + layer.mlp(layer.mlp_norm(x + mark))  # type: ignore[operator]
            assert same(one_look, delta) == (kv == "dense")  # else chosen rows look again, at their new k


def test_a_rank_up_to_one_is_a_share() -> None:
    weight = value_weight(tiny_model("tiny-llada"), 1)
    assert weight.shape == (64, 64)
    assert [singular_proxy(weight, rank).shape[0] for rank in (1, 0.25, 0.001, 2, 16)] == [64, 16, 1, 2, 16]
    torch.testing.assert_close(singular_proxy(weight, 1).T @ singular_proxy(weight, 1), weight.T @ weight)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("identifier", ["value", "proxy", "input", "attention"])
def test_one_changed_token_is_chosen_in_every_layer(name: str, identifier: str) -> None:
    """The row that speaks for a changed token drifts most in the first scored layer."""
    _, network = feed(double_model(name), 2, identifier=identifier, rank=1, **NEVER)
    here = network.passes[1]
    assert len(here.new) == 1
    for layer in here.layers[1:]:
        assert len(layer.chosen) == 4
        if identifier != "attention":
            assert set(here.new) <= set(layer.chosen)
            assert min(layer.drift, key=layer.drift.__getitem__) == here.new[0]


@pytest.mark.parametrize("name", MODELS)
def test_new_tokens_are_computed_if_asked_for(name: str) -> None:
    model = double_model(name)
    few = {"ratio": 0.2, "store": "scatter_selected", **NEVER}  # 3 rows for 4 new tokens
    off, first, union = (feed(model, 4, 4, force_new=one, **few)[1] for one in ("off", "first", "union"))
    for number in (1, 2, 3):
        for kind, run in (("off", off), ("first", first), ("union", union)):
            new, layer = set(run.passes[number].new), run.passes[number].layers[1]
            assert len(new) == 4
            order = sorted(layer.drift, key=layer.drift.__getitem__)
            if kind == "off":
                assert set(layer.chosen) == set(order[:3])
            elif kind == "first":
                assert layer.chosen == sorted([i for i in order if i in new][:3])
            else:
                assert set(layer.chosen) == new | set(order[:3])
    room = feed(model, 4, 2, force_new="first", ratio=0.3, **NEVER)[1]
    for one in room.passes[1:]:
        for layer in one.layers[1:]:
            rest = sorted(set(layer.drift) - set(one.new), key=layer.drift.__getitem__)
            assert set(layer.chosen) == {*one.new, *rest[:2]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("changes", [{}, {"kv": "sparse", "reuse": "absolute"}], ids=str)
def test_a_delta_is_what_a_computed_layer_adds(name: str, changes: dict[str, Any]) -> None:
    _, network = feed(double_model(name), 5, **{**OFTEN, **changes})
    here = network.passes[3]
    assert (here.kind, network.passes[4].kind) == ("gen", "partial")
    # Memory after pass 4: rows that it did not compute still have the deltas of pass 3.
    for number, layer in enumerate(here.layers):
        kept = set(range(9, 25)) - set(network.passes[4].layers[number].rows)
        assert kept or number == 0
        for i in kept:
            added = here.streams[number + 1][i] - here.streams[number][i]
            torch.testing.assert_close(added, network.memory[number].delta[i], atol=1e-9, rtol=1e-9)
            later = network.passes[4].streams
            moved = later[number + 1][i] - later[number][i]
            if changes:
                torch.testing.assert_close(later[number + 1][i], here.streams[number + 1][i])
            else:
                torch.testing.assert_close(moved, network.memory[number].delta[i], atol=1e-9, rtol=1e-9)
            if number == 1:  # its input is new everywhere, behind the first layer
                assert same(moved, network.memory[number].delta[i]) == (changes == {})
                assert same(later[number + 1][i], here.streams[number + 1][i]) == (changes != {})
        assert layer.rows == list(range(0 if number == 0 else 9, 25))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("changes", [{"ratio": (0.0, 0.0, 0.5)}, {"ratio": 0.0}], ids=str)
def test_a_ratio_of_zero_leaves_a_layer_alone(name: str, changes: dict[str, Any]) -> None:
    for more in ({}, {"force_new": "union"}, DLLM_CACHE):
        _, network = feed(double_model(name), 3, **{**more, **changes, **NEVER})
        for one in network.passes[1:]:
            assert len(one.layers[0].rows) == 25
            untouched = one.layers[1]
            assert not any((untouched.rows, untouched.drift, untouched.wrote_k, untouched.wrote_v))
            others = one.layers[2].chosen
            assert len(others) == 0 if changes["ratio"] == 0.0 else len(others) >= 8


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_writes_of_each_pass(name: str) -> None:
    everything, answer = list(range(25)), list(range(9, 25))
    for kv in ("dense", "values", "sparse"):
        _, network = feed(double_model(name), kv=kv, together=False, full_every=4, answer_every=3)
        for one in network.passes:
            assert one.layers[0].rows == one.layers[0].wrote_k == one.layers[0].wrote_v == everything
            for layer in one.layers[1:]:
                fresh = {"full": everything, "gen": answer, "prompt": everything[:9], "partial": []}[one.kind]
                assert layer.fresh == fresh
                scored = answer if one.kind in ("prompt", "partial") else []
                assert sorted(layer.drift) == scored
                assert len(layer.chosen) == (4 if scored else 0)
                assert layer.rows == sorted({*fresh, *layer.chosen})
                assert layer.wrote_k == sorted({*fresh, *(scored if kv == "dense" else layer.chosen)})
                assert layer.wrote_v == sorted({*fresh, *(layer.chosen if kv == "sparse" else scored)})
        kinds = [one.kind for one in network.passes]
        assert kinds == ["full", "partial", "partial", "gen", "prompt", "partial", "gen", "partial", "prompt"]
        assert [round(3 * one.num_rows) for one in network.passes[:5]] == [75, 33, 33, 57, 51]


def test_warm_up_refreshes_everything() -> None:
    for together in (True, False):
        _, network = feed(double_model("tiny-dream"), 5, warmup=1, together=together, full_every=None, answer_every=4)
        assert [one.kind for one in network.passes] == ["full", "full", "partial", "partial", "gen"]


# --- the shift


def test_the_row_before_dreams_answer() -> None:
    model = double_model("tiny-dream")
    runs = {row: feed(model, first_row=row, **OFTEN) for row in ("saved", "stream", "live", "own")}
    partial = [number for number, one in enumerate(runs["saved"][1].passes) if one.kind != "full"]
    for number in partial:
        logits = {row: found[number] for row, (found, _) in runs.items()}
        full = 0 if number < 6 else 6
        assert same(logits["saved"][0], runs["saved"][0][full][0])
        assert same(logits["own"][0], logits["own"][1])
        for row in ("stream", "own"):
            assert same(logits[row][1:], logits["saved"][1:])
            assert not same(logits[row][0], logits["saved"][0])
    assert runs["live"][1].passes[3].layers[1].rows == list(range(8, 25))
    assert sorted(runs["live"][1].passes[1].layers[1].drift) == list(range(8, 25))
    # A refresh of the prompt alone, too, computes the row that the answer's first position is predicted by.
    apart = {row: feed(model, **{**UNEQUAL, "first_row": row}) for row in ("saved", "stream")}
    for number, one in enumerate(apart["saved"][1].passes):
        expected = one.kind in ("full", "prompt")
        assert same(apart["saved"][0][number][0], apart["stream"][0][number][0]) == expected


# --- the paper's form, written differently


class Arrays:
    """The paper's algorithm on arrays over the whole canvas, with the model's own modules: k and v of chosen rows,
    whole outputs, all positions scored in all layers, nothing refreshed."""

    def __init__(self, model: Transformer, length: int, rank: int, ratios: Sequence[float]) -> None:
        c, self.model, self.first = model.config, model, True
        self.num = [int(length * ratio) for ratio in ratios]
        self.k, self.v = (torch.zeros(c.num_layers, length, c.num_kv_heads, c.head_dim).double() for _ in range(2))
        self.out = torch.zeros(c.num_layers, length, c.hidden_size).double()
        self.mark = torch.zeros(c.num_layers, length, rank).double()
        weights = [layer.attn.qkv.weight[-c.num_kv_heads * c.head_dim :] for layer in model.layers]  # type: ignore[union-attr]
        self.proxy = [torch.linalg.svd(weight, full_matrices=False) for weight in weights]

    @torch.inference_mode()
    def __call__(self, canvas: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        x, pos, picked = self.model.embed(torch.tensor(canvas)), torch.arange(len(canvas)), []
        rank = self.mark.shape[-1]
        for n, layer in enumerate(self.model.layers):
            normed = layer.attn_norm(x)  # type: ignore[operator]
            _, s, vh = self.proxy[n]
            mark = normed @ (s[:rank, None] * vh[:rank]).T
            rows = pos
            if not self.first:
                drift = F.cosine_similarity(mark, self.mark[n], dim=-1)
                drift[(mark == self.mark[n]).all(1)] = 1
                rows = drift.argsort(stable=True)[: self.num[n]].sort().values
            q, k, v = layer.attn.split(normed[rows])  # type: ignore[union-attr, operator]
            cos, sin = self.model.rope.at(rows)
            self.k[n, rows], self.v[n, rows], self.mark[n] = ops.rope(k, cos, sin), v, mark
            grouped = [one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (self.k[n], self.v[n])]
            scores = torch.einsum("rhd,nhd->hrn", ops.rope(q, cos, sin), grouped[0]) / math.sqrt(q.shape[-1])
            mixed = torch.einsum("hrn,nhd->rhd", scores.softmax(-1), grouped[1]).flatten(1)
            middle = x[rows] + layer.attn.out(mixed)  # type: ignore[union-attr, operator]
            self.out[n, rows] = middle + layer.mlp(layer.mlp_norm(middle))  # type: ignore[operator]
            x = self.out[n].clone()
            picked.append(rows.tolist())
        self.first = False
        return self.model.logits(self.model.norm(x)), picked


FEWER = (0.4, 0.3, 0.2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ratios", [(0.3, 0.3, 0.3), (0.2, 0.4, 0.5), FEWER], ids=str)
def test_the_papers_form_equals_its_array_form(name: str, ratios: tuple[float, ...]) -> None:
    """Rows that no layer before has computed have not moved. So where no layer computes fewer rows than the one before
    it, none that moved is left out, and neither what is reused nor what is written beside the chosen rows matters."""
    model = double_model(name)
    start, seen = canvases(model, 8, each=2)
    settings = {"rank": 8, "ratio": ratios, **PAPER}
    network = DriftNetwork(model, start, DriftSettings(**settings))
    delta = DriftNetwork(model, start, DriftSettings(**{**settings, "reuse": "delta"}))
    dense = DriftNetwork(model, start, DriftSettings(**{**settings, "kv": "dense"}))
    arrays = Arrays(model, 25, 8, ratios)
    for number, canvas in enumerate(seen):
        want, picked = arrays(canvas)
        assert same(network(canvas), want)
        assert [one.rows for one in network.passes[-1].layers] == picked
        assert same(delta(canvas), want) == (number == 0 or ratios != FEWER)
        assert same(dense(canvas), want) == (number == 0 or ratios != FEWER)


# --- whole requests


def ends_as_ours(case: dict[str, Any]) -> bool:
    """Whether the case stops nowhere, and its schedule is LLaDA's: a pass without a commit is none here."""
    return case["model"] != "tiny-dream" and case["settings"].get("early_stop_steps", 10000) == 10000


@pytest.mark.parametrize("case", [one for one in SPA + DLLM if one.id not in REFUSED and ends_as_ours(one.values[0])])
def test_the_house_loop_gives_the_same_answers(case: dict[str, Any]) -> None:
    said = case["settings"]
    names = {"threshold": "threshold", "dynamic_threshold_factor": "factor"}
    kept = {ours: said[theirs] for theirs, ours in names.items() if theirs in said} or {"steps": said["steps"]}
    params = SamplingParams(max_tokens=said["gen_length"], block_length=said["block_length"], ignore_eos=True, **kept)
    found = decode(tiny_model(case["model"]), case["prompt_ids"], params, settings_of(case))
    assert found.run.token_ids == case["output_ids"]
    assert len(found.passes) == found.run.num_passes == case["nfe"]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_kept_behind_an_end_of_text(name: str) -> None:
    """From the pass after it on the request is one with a shorter canvas."""
    model = tiny_model(name)
    start, seen = canvases(model, 4)
    network = DriftNetwork(model, start, DriftSettings(rank=8, ratio=0.5, **NEVER))
    for canvas, end in zip(seen, (25, 25, 19, 19)):
        network(canvas[:end])
        for memory in network.memory:
            for plane in (memory.k, memory.v, memory.delta, memory.out, memory.mark):
                assert sorted(plane) == list(range(end))
    assert [len(one.layers[1].chosen) for one in network.passes] == [0, 8, 5, 5]


SWITCHES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("tiny-llada", {}, {"identifier": "value"}),
    ("tiny-llada", {}, {"identifier": "input"}),
    ("tiny-llada", {}, {"identifier": "attention"}),
    ("tiny-llada", {}, {"rank": 2}),
    ("tiny-llada", {}, {"ratio": 0.6}),
    ("tiny-llada", {}, {"reuse": "absolute"}),
    ("tiny-llada", {}, {"kv": "values"}),
    ("tiny-llada", {}, {"kv": "sparse"}),
    ("tiny-llada", {}, {"store": "scatter_selected"}),
    ("tiny-llada", {"ratio": 0.1}, {"force_new": "first"}),
    ("tiny-llada", {"ratio": 0.1}, {"force_new": "union"}),
    ("tiny-llada", {}, {"region": "all"}),
    ("tiny-llada", {}, {"layer0": "sparse"}),
    ("tiny-llada", {}, {"together": False}),
    ("tiny-llada", {}, {"full_every": 4}),
    ("tiny-llada", {}, {"answer_every": None}),
    ("tiny-llada", {}, {"warmup": 2}),
    ("tiny-dream", {}, {"first_row": "stream"}),
    ("tiny-dream", {}, {"first_row": "own"}),
    ("tiny-dream", {}, {"first_row": "live"}),
]


@functools.cache
def request_commits(name: str, seed: int, changes: tuple[tuple[str, Any], ...]) -> list[Any]:
    params = SamplingParams(max_tokens=32, block_length=16, threshold=0.9)
    settings = DriftSettings(**{"rank": 8, "full_every": 9, "answer_every": 4, **dict(changes)})
    return decode(tiny_model(name), made_up_prompt(12, seed), params, settings).run.commits


@pytest.mark.parametrize(("name", "base", "change"), SWITCHES, ids=str)
def test_every_switch_matters(name: str, base: dict[str, Any], change: dict[str, Any]) -> None:
    """To what is committed, and in which pass."""

    def commits(seed: int, **settings: Any) -> list[Any]:
        return request_commits(name, seed, tuple(settings.items()))

    assert any(commits(seed, **base) != commits(seed, **base, **change) for seed in range(3))


@pytest.mark.parametrize("name", MODELS)
def test_but_the_exact_savings(name: str) -> None:
    """Probabilities differ in their last bits, as products of other shapes do."""
    usual = request_commits(name, 0, ())
    found = request_commits(name, 0, (("layer0", "gen_only"), ("head", "masked")))
    assert [(one.position, one.token_id, one.num_pass) for one in found] == [
        (one.position, one.token_id, one.num_pass) for one in usual
    ]
