"""FreeDave, served: what the reference gave (cychomatica/FreeDave@8b48121), and always the answers of one token a pass
from the same cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.served import COMMON, Ask, bare, load, serve
from engine.test_served_golden import commits
from engine.test_served_golden import load as golden_cases
from oracles.flash import made_up_prompt
from oracles.golden import tiny_model
from unmask import LLM, METHODS, Method, SamplingParams
from unmask.core.canvas import Canvas
from unmask.decoding.drafter import Nested, Verdict
from unmask.engine.graphs import FixedSteps
from unmask.engine.outputs import CompletionOutput
from unmask.errors import ConfigError, MethodError
from unmask.eval import continuous
from unmask.eval.continuous import Way, compare

LLADA = ("tiny-llada", "tiny-llada-gqa")
Golden = dict[str, Any]
forms = pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])


def freedave(num_drafts: int = 3, block_width: int = 16) -> Method:
    return replace(METHODS["freedave"], options={"num_drafts": num_drafts, "block_width": block_width})


def in_form(llm: LLM, fixed: bool) -> LLM:
    if fixed:
        llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    return llm


# --- what the reference gave


def cases() -> list[Golden]:
    """With the cache that holds the rest of the canvas still. The other one recomputes what follows the block in every
    view, which is no view of one canvas."""
    return [each for each in golden_cases("freedave_llada", "tiny-llada") if each["settings"]["dual_cache"]]


def generate(golden: Sequence[Golden], fixed: bool) -> list[CompletionOutput]:
    llm = LLM(tiny_model("tiny-llada"), method=freedave(), tokenizer=None, max_num_seqs=2)
    said = [
        SamplingParams(
            max_tokens=each["settings"]["gen_length"],
            block_length=each["settings"]["block_length"],
            ignore_eos=True,
            trajectory=True,
        )
        for each in golden
    ]
    prompts = [{"prompt_token_ids": each["prompt_ids"]} for each in golden]
    return [each.outputs[0] for each in in_form(llm, fixed).generate(prompts, said)]


def check(got: CompletionOutput, want: Golden) -> None:
    """The reference's first forward of a block only proposes; ours commits what it found, and so is one commit ahead
    within a block. As many passes; the same order."""
    assert want["settings"]["draft_steps"] == METHODS["freedave"].option("num_drafts") + 1
    assert got.token_ids == want["output_ids"] == want["static_output_ids"], want["id"]
    assert got.num_forward_passes == want["nfe"] < want["static_nfe"], want["id"]
    length = want["settings"]["block_length"]
    blocks = [{pos // length for pos in each} for each in commits(got)]
    assert all(len(each) == 1 for each in blocks)


@forms
def test_what_the_reference_gave(fixed: bool) -> None:
    golden = cases()
    for got, want in zip(generate(golden, fixed), golden, strict=True):
        check(got, want)
    for want in golden:
        check(generate([want], fixed)[0], want)


# --- one token a pass


def asks(model: str, count: int, seed: int, width: int = 16) -> list[Ask]:
    """Requests with blocks up to the width, ends of text, banned ids, filters, and some tokens given."""
    r = random.Random(seed)
    out = []
    for number in range(count):
        length = r.randint(1, 24)
        said: dict[str, Any] = {"block_length": r.randint(1, width), "trajectory": True}
        banned = {"suppress_token_ids": COMMON[model][:1]}
        said |= r.choice(({}, {}, {"top_k": 3}, banned, {"min_tokens": min(4, length)}))
        prompt = made_up_prompt(r.randint(1, 20), number)
        if number % 4 == 3 and "min_tokens" not in said:
            text = [r.choice((None, None, 7)) for _ in range(length)] + [None]
            out.append(Ask(prompt if r.random() < 0.5 else (), SamplingParams(**said), tuple(text), arrives=number))
            continue
        said |= {"ignore_eos": True, "stop_token_ids": r.choice(((), COMMON[model]))}
        out.append(Ask(prompt, SamplingParams(max_tokens=length, **said), arrives=r.randint(0, 9)))
    return out


def answer(out: CompletionOutput) -> Any:
    """What must not depend on drafts."""
    return out.token_ids, out.finish_reason, out.stop_reason


def one_a_pass(requests: Sequence[Ask]) -> list[Ask]:
    """No probability reaches the threshold, so every pass commits its best candidate."""
    return [replace(ask, params=ask.params.replace(threshold=2.0)) for ask in requests]


@forms
@pytest.mark.parametrize(("num_drafts", "width"), [(1, 16), (3, 16), (7, 8), (3, 4)])
@pytest.mark.parametrize("model", LLADA)
def test_the_answers_of_one_token_a_pass(model: str, num_drafts: int, width: int, fixed: bool) -> None:
    requests = asks(model, 12, seed=num_drafts, width=width)
    fast = serve(in_form(load(model, freedave(num_drafts, width)), fixed), requests)
    slow = serve(load(model, bare("fast-dllm-dual")), one_a_pass(requests))
    assert [answer(out) for out in fast] == [answer(out) for out in slow]
    for one, other in zip(fast, slow):
        order = {event.position: event.num_pass for event in other.trajectory or ()}
        assert len(set(order.values())) == len(order), "one token a pass"
        together = [[order[pos] for pos in each] for each in commits(one)]
        assert sorted(map(min, together)) == [min(each) for each in together], "in the same order"
    passes = [sum(out.num_forward_passes for out in outs) for outs in (fast, slow)]
    assert passes[0] < passes[1], "drafts are accepted"


def test_drafts_that_nobody_proves_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is proposed is accepted."""
    verdict = Nested.verdict

    def believing(self: Nested, canvas: Canvas, *rest: Any) -> Verdict:
        found = verdict(self, canvas, *rest)
        return replace(found, accepted_SZ=canvas.pending_pos_SZ >= 0)

    monkeypatch.setattr(Nested, "verdict", believing)
    requests = asks("tiny-llada", 8, seed=1)
    fast = serve(load("tiny-llada", freedave()), requests)
    slow = serve(load("tiny-llada", bare("fast-dllm-dual")), one_a_pass(requests))
    assert [answer(out) for out in fast] != [answer(out) for out in slow]


def test_views_that_see_the_canvas_block_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the canvas's own rows of the block are seen beside a view's."""
    scratch = Nested.scratch

    def leaking(self: Nested, canvas: Canvas) -> Any:
        out = scratch(self, canvas)
        return replace(out, shadow_SN=torch.zeros_like(out.shadow_SN))

    monkeypatch.setattr(Nested, "scratch", leaking)
    requests = asks("tiny-llada", 8, seed=1)
    fast = serve(load("tiny-llada", freedave()), requests)
    slow = serve(load("tiny-llada", bare("fast-dllm-dual")), one_a_pass(requests))
    assert [answer(out) for out in fast] != [answer(out) for out in slow]


# --- beside others


@forms
@pytest.mark.parametrize("network", ["llada", "llada-gqa"])
def test_a_crowd_is_everybody_alone(network: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = continuous._said

    def quiet(method: str, r: random.Random) -> dict[str, Any]:
        """What may be said of one token a pass."""
        kept = ("max_tokens", "stop_token_ids", "ignore_eos", "block_length")
        out = {name: value for name, value in said(method, r).items() if name in kept}
        return out if out.get("block_length") else out | {"block_length": 7}

    monkeypatch.setattr(continuous, "_said", quiet)
    out = compare("freedave", network, 72, seed=3, seats=8, way=Way(fixed=fixed))
    assert not out.different
    assert out.lost_pages == 0
    assert out.most_seats > 1
    assert out.num_waits > 0


def test_the_list_of_a_pass_fits_the_kernels() -> None:
    """The row of the table, whatever is changed in it."""
    from unmask.ops.triton.attend import MAX_LIVE

    for num_drafts, width in ((3, 16), (1, 32), (7, 8)):
        nested = load("tiny-llada", freedave(num_drafts, width)).engine.axes.drafter
        assert isinstance(nested, Nested)
        assert nested.num_scratch + nested.block_width == MAX_LIVE


# --- where it would not be right


def complete(params: SamplingParams, method: Method | None = None, **advice: Any) -> SamplingParams:
    return (method or METHODS["freedave"]).complete(params, advice, {"max_tokens": 128})


@pytest.mark.parametrize(
    "said",
    [
        {"threshold": 0.9},
        {"threshold": 1.0},
        {"steps": 128},
        {"factor": 1.0},
        {"entropy_bound": 0.1},
        {"alg": "entropy"},
        {"alg": "topk_margin"},
        {"remasking": "random"},
        {"temperature": 0.5},
        {"alg_temp": 0.1},
        {"cfg_scale": 1.0},
        {"refresh_interval": 4},
        {"block_length": 17},
        {"block_length": 0},
    ],
    ids=lambda each: "-".join(map(str, each)),
)
def test_requests_that_drafts_would_change_are_refused(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(ConfigError, match=name):
        complete(SamplingParams(**said))


def test_requests_that_are_served() -> None:
    assert complete(SamplingParams()).block_length == 16
    assert complete(SamplingParams(), block_length=32).block_length == 16, "advice for longer blocks"
    assert complete(SamplingParams(), block_length=8).block_length == 8
    assert complete(SamplingParams(block_length=0, max_tokens=16)).block_length == 0
    assert complete(SamplingParams(remasking="low_confidence", threshold=1.5)).threshold == 1.5
    with pytest.raises(ConfigError, match="use threshold=2"):
        complete(SamplingParams(), replace(METHODS["freedave"], sampling={}))


def test_rows_that_are_no_good() -> None:
    with pytest.raises(MethodError, match=r"num_drafts=4 over block_width=16 need 80 entries .* at most 12"):
        freedave(4, 16)
    with pytest.raises(MethodError, match="num_drafts=5 do not fit block_width=4"):
        freedave(5, 4)
    for policy in ("prefix", "recompute", "delayed"):
        with pytest.raises(MethodError, match=f"'nested'.*{policy!r}.*use policy 'dual'"):
            replace(METHODS["freedave"], policy=policy)
    with pytest.raises(MethodError, match=r"'freedave' .* row p - 1; .* 'fast-dllm-dual'"):
        LLM(tiny_model("tiny-dream"), method="freedave", tokenizer=None)
