"""The fixed-shape step is the same decoding: equal to the references in mixed batches, and free of host decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.fixed import BlockCausal, Case, Dual, Nested, Pipeline, case, d2f, make_step, run, seats_of
from unmask.cache.policy import Limits, Prefix
from unmask.config import SamplingParams
from unmask.core.canvas import Canvas
from unmask.models.loading import load_model
from unmask.models.transformer import Transformer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MODELS = ("tiny-llada", "tiny-llada-gqa")


def load(name: str, model: str) -> list[dict[str, Any]]:
    return [each for each in json.loads((GOLDEN / f"{name}.json").read_text())["cases"] if each["model"] == model]


def tiny(name: str) -> Transformer:
    return load_model(GOLDEN / "models" / name, dtype="float32")


def llada(each: dict[str, Any]) -> Case:
    """A golden case of the LLaDA families. The reference does not stop at an end of text."""
    s = each["settings"]
    said = {name: s[name] for name in ("threshold", "factor", "cfg_scale") if s.get(name)}
    said |= {} if {"threshold", "factor"} & set(said) else {"steps": s["steps"]}
    said |= {"suppress_eos": s.get("logits_eos_inf", False), "ignore_eos": True}
    said |= {"eos_confidence_last": s.get("confidence_eos_eot_inf", False)}
    held = [s[name] for name in ("eos_id", "eot_id") if name in s]
    params = SamplingParams(max_tokens=s["gen_length"], block_length=s["block_length"], **said)
    return case(each["prompt_ids"], params, tuple(held[:1] if said["suppress_eos"] else held))


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "ragged"])
@pytest.mark.parametrize("name", MODELS)
def test_schedule_threshold_and_factor_in_one_batch(name: str, fixed: bool) -> None:
    """Guided requests, banned ends of text, schedules, thresholds and factors, and two seats that stay empty."""
    golden = [each for f in ("llada_vanilla", "llada_threshold", "llada_factor") for each in load(f, name)]
    golden = [each for each in golden if each["id"] != "factor-10"]  # rests on a slip of the reference
    cases = [llada(each) for each in golden]
    step = make_step(tiny(name), cases, seats=seats_of(cases)[-1] + 4, fixed=fixed)
    for got, want in zip(run(step, cases), golden):
        assert got.token_ids == want["output_ids"], want["id"]
        assert got.num_passes == want["nfe"], want["id"]


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "ragged"])
@pytest.mark.parametrize("policy", ["recompute", "block-causal"])
@pytest.mark.parametrize("name", [*MODELS, "tiny-dream"])
def test_d2f_in_one_batch(name: str, policy: str, fixed: bool) -> None:
    """Pipelined blocks; the exact cache and no cache give the same tokens in the same passes."""
    golden = load("d2f_dream" if name == "tiny-dream" else "d2f_llada", name)
    cases = [d2f(each["prompt_ids"], each["settings"]) for each in golden]
    chosen = {"policy": BlockCausal()} if policy == "block-causal" else {}
    step = make_step(tiny(name), cases, frontier=Pipeline(), **chosen, fixed=fixed)
    for got, want in zip(run(step, cases), golden):
        assert got.token_ids == want["output_ids"], want["id"]
        assert got.num_passes == want["nfe"], want["id"]
        order = {pos: number + 1 for number, each in enumerate(want["steps"]) for pos in each["pos"]}
        assert got.commit_pass == [order[pos] for pos in range(len(order))], want["id"]


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "ragged"])
def test_freedave_dual_in_one_batch(fixed: bool) -> None:
    golden = [each for each in load("freedave_llada", "tiny-llada") if each["settings"]["dual_cache"]]
    cases = []
    for each in golden:
        s = each["settings"]
        params = SamplingParams(max_tokens=s["gen_length"], block_length=s["block_length"], steps=s["gen_length"])
        cases.append(case(each["prompt_ids"], params, quota=(1,) * s["gen_length"]))
    drafter = Nested(num_drafts=3, block_width=max(each.block_length for each in cases))
    for got, want in zip(
        run(make_step(tiny("tiny-llada"), cases, policy=Dual(), drafter=drafter, fixed=fixed), cases), golden
    ):
        assert got.token_ids == want["output_ids"] == want["static_output_ids"], want["id"]
        assert got.num_passes == want["nfe"] < want["static_nfe"], want["id"]


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "ragged"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("name", MODELS)
def test_fast_dllm_caches_in_one_batch(name: str, cache: str, fixed: bool) -> None:
    """The reference runs one more pass on a block that its first pass has finished; that pass commits nothing and is
    not run here."""
    golden = [each for each in load("fast_dllm_llada", name) if each["cache"] == cache]
    cases = [llada(each) for each in golden]
    step = make_step(tiny(name), cases, policy=Prefix() if cache == "prefix" else Dual(), fixed=fixed)
    for got, want in zip(run(step, cases), golden):
        assert got.token_ids == want["output_ids"], want["id"]
        assert got.num_passes == want["nfe"] - sum(not each["pos"] for each in want["steps"]), want["id"]


def test_a_cache_that_never_refreshes_gives_other_answers() -> None:
    """Negative control: the golden data depends on the refresh at a block's first pass."""

    class Stale(Dual):
        def due(self, canvas: Canvas, limits: Limits) -> Tensor:  # noqa: ARG002
            return canvas.pass_S == 0

    golden = [each for each in load("fast_dllm_llada", "tiny-llada") if each["cache"] == "dual"]
    cases = [llada(each) for each in golden]
    got = run(make_step(tiny("tiny-llada"), cases, policy=Stale()), cases)
    assert [each.token_ids for each in got] != [want["output_ids"] for want in golden]
