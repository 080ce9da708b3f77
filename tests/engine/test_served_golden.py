"""The served engine gives what the references gave with their caches: ids, passes and commits, all cases of a model in
one batch with fewer seats than cases, so that requests join late, and each alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from engine.test_step import GOLDEN
from oracles.golden import tiny_model
from unmask import LLM, SamplingParams
from unmask.cache.policy import Dual, Limits
from unmask.core.canvas import Canvas
from unmask.engine.outputs import CompletionOutput
from unmask.methods import METHODS, Method

LLADA = ("tiny-llada", "tiny-llada-gqa")
MODELS = (*LLADA, "tiny-dream")


def load(name: str, model: str) -> list[dict[str, Any]]:
    return [each for each in json.loads((GOLDEN / f"{name}.json").read_text())["cases"] if each["model"] == model]


def method(name: str, **changes: Any) -> Method:
    """A row of the table without its recommended rule, which the cases bring themselves."""
    row = METHODS[name]
    sampling = {k: v for k, v in row.sampling.items() if k not in ("threshold", "block_length")}
    return dataclasses.replace(row, sampling=sampling, **changes)


def serve(
    model: str, row: Method, requests: Sequence[tuple[Sequence[int], SamplingParams]], seats: int = 3
) -> list[CompletionOutput]:
    llm = LLM(model=tiny_model(model), method=row, tokenizer=None, max_num_seqs=seats, allow_attention_mismatch=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in requests]
    return [each.outputs[0] for each in llm.generate(prompts, [params for _, params in requests])]


def commits(out: CompletionOutput) -> list[list[int]]:
    """Answer positions by step, without steps that commit nothing."""
    steps: dict[int, list[int]] = {}
    for event in sorted(out.trajectory or (), key=lambda e: (e.num_pass, e.position)):
        steps.setdefault(event.num_pass, []).append(event.position)
    return list(steps.values())


# --- Fast-dLLM


def fast_dllm(model: str, cache: str) -> list[dict[str, Any]]:
    """Cases in one form: a prompt, an answer, the commits of each forward."""
    if model != "tiny-dream":
        return [each for each in load("fast_dllm_llada", model) if each["cache"] == cache]
    cases = [each for each in load("fast_dllm_dream", model) if each["cache"] == cache]
    rows = [
        dict(zip(("prompt_ids", "output_ids", "steps"), r))
        for c in cases
        for r in zip(c["prompt_ids"], c["output_ids"], c["steps"])
    ]
    return [{**each, **row} for each, row in zip(cases, rows, strict=True)]


def asked(each: dict[str, Any]) -> SamplingParams:
    s = each["settings"]
    said: dict[str, Any] = {name: s[name] for name in ("threshold", "factor") if s.get(name)}
    said |= {} if said else {"steps": s["steps"]}
    if s.get("alg") == "entropy":
        said["alg"] = "entropy"
    length = s.get("gen_length") or s["max_new_tokens"]
    return SamplingParams(max_tokens=length, block_length=s["block_length"], ignore_eos=True, trajectory=True, **said)


def check_fast_dllm(got: CompletionOutput, want: dict[str, Any]) -> None:
    """The reference runs passes that commit nothing: one more on a block that its first pass has finished (LLaDA), a
    scheduled quota of 0 (Dream). They are not run here."""
    assert got.token_ids == want["output_ids"], want["id"]
    useful = [each["pos"] for each in want["steps"] if each["pos"]]
    assert commits(got) == [sorted(each) for each in useful], want["id"]
    assert got.num_forward_passes == len(useful) <= want["nfe"], want["id"]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("model", MODELS)
def test_fast_dllm(model: str, cache: str) -> None:
    golden = fast_dllm(model, cache)
    row = method(f"fast-dllm-{cache}")
    requests = [(each["prompt_ids"], asked(each)) for each in golden]
    for got, want in zip(serve(model, row, requests), golden, strict=True):
        check_fast_dllm(got, want)
    for request, want in zip(requests, golden):
        check_fast_dllm(serve(model, row, [request])[0], want)


@pytest.mark.parametrize("model", LLADA)
def test_a_cache_that_is_never_refreshed_is_noticed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def due(self: Dual, canvas: Canvas, limits: Limits) -> Tensor:  # noqa: ARG001
        return canvas.pass_S == 0

    monkeypatch.setattr(Dual, "due", due)
    golden = fast_dllm(model, "dual")
    got = serve(model, method("fast-dllm-dual"), [(each["prompt_ids"], asked(each)) for each in golden])
    assert [each.token_ids for each in got] != [each["output_ids"] for each in golden]


# --- D2F


def d2f(each: dict[str, Any]) -> tuple[list[int], SamplingParams]:
    """As the reference runs it: whole blocks only, no bound on the blocks in flight, and all of them finished."""
    s = each["settings"]
    alg = {"neg_entropy": "entropy", "margin_confidence": "topk_margin"}.get(s.get("sampling_strategy"))
    return each["prompt_ids"], SamplingParams(
        max_tokens=s["max_new_tokens"] // s["block_size"] * s["block_size"],
        block_length=s["block_size"],
        threshold=s["skip_threshold"],
        tau_add=s["block_add_threshold"],
        tau_act=s["decoded_token_threshold"],
        pipeline_depth=1 << 20,
        early_stop=False,
        ignore_eos=True,
        stop_token_ids=(s["eos_token_id"],),
        trajectory=True,
        alg=alg,
    )


def check_d2f(got: CompletionOutput, want: dict[str, Any]) -> None:
    end = want["settings"]["eos_token_id"]
    answer = want["output_ids"]
    assert got.token_ids == (answer[: answer.index(end)] if end in answer else answer), want["id"]
    assert got.num_forward_passes == want["nfe"], want["id"]
    order = {pos: number + 1 for number, each in enumerate(want["steps"]) for pos in each["pos"]}
    assert {e.position: e.num_pass for e in got.trajectory or ()} == {
        pos: order[pos] for pos in range(len(got.token_ids))
    }, want["id"]


@pytest.mark.parametrize("name", ["d2f", "d2f-uncached"])
@pytest.mark.parametrize("model", MODELS)
def test_d2f(model: str, name: str) -> None:
    golden = load("d2f_dream" if model == "tiny-dream" else "d2f_llada", model)
    requests = [d2f(each) for each in golden]
    for got, want in zip(serve(model, method(name), requests), golden, strict=True):
        check_d2f(got, want)
    for request, want in zip(requests, golden):
        check_d2f(serve(model, method(name), [request])[0], want)


def test_a_threshold_that_may_be_met_exactly_is_noticed() -> None:
    """Negative control: other thresholds give other answers."""
    golden = load("d2f_llada", "tiny-llada")
    requests = [(prompt, params.replace(threshold=0.3)) for prompt, params in map(d2f, golden)]
    got = serve("tiny-llada", method("d2f"), requests)
    assert [out.token_ids for out in got] != [each["output_ids"] for each in golden]
