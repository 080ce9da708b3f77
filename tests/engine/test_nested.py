"""FreeDave, served: what the reference gave (cychomatica/FreeDave@8b48121), and always the answers of the threshold
rule, one token a pass among them, from the same cache."""

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
from unmask.methods import check_weights, registered

MODELS = ("tiny-llada", "tiny-llada-gqa", "tiny-dream")
LONGEST = 25
"""The longest answer of `asks`, which over the prefix cache is the width of a view."""
Golden = dict[str, Any]
FORMS = [("dual", False), ("dual", True), ("prefix", False)]
forms = pytest.mark.parametrize(("policy", "fixed"), FORMS, ids=["dual-ragged", "dual-fixed", "prefix-ragged"])


def freedave(num_drafts: int = 3, block_width: int = 16, policy: str = "dual") -> Method:
    return replace(METHODS["freedave"], policy=policy, options={"num_drafts": num_drafts, "block_width": block_width})


def in_form(llm: LLM, fixed: bool) -> LLM:
    if fixed:
        assert llm.engine.axes.static
        llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    return llm


# --- what the reference gave


def cases(model: str, policy: str) -> list[Golden]:
    """Of one cache: which holds the rest of the canvas still, or recomputes what follows the block, in every view."""
    golden = golden_cases("freedave_dream" if model == "tiny-dream" else "freedave_llada", model)
    return [each for each in golden if each["settings"]["dual_cache"] == (policy == "dual")]


def generate(golden: Sequence[Golden], policy: str, fixed: bool, drafted: bool = True) -> list[CompletionOutput]:
    """Cases of as many drafts."""
    settings = [each["settings"] for each in golden]
    ((model, num_drafts),) = {(each["model"], each["settings"]["draft_steps"] - 1) for each in golden}
    width = max(each["gen_length" if policy == "prefix" else "block_length"] for each in settings)
    row = freedave(num_drafts, width, policy) if drafted else bare(f"fast-dllm-{policy}")
    llm = LLM(tiny_model(model), method=row, tokenizer=None, max_num_seqs=2)
    said = [
        SamplingParams(
            max_tokens=each["gen_length"],
            block_length=each["block_length"],
            threshold=each.get("confidence_threshold", 2.0),
            ignore_eos=True,
            trajectory=True,
        )
        for each in settings
    ]
    prompts = [{"prompt_token_ids": each["prompt_ids"]} for each in golden]
    return [each.outputs[0] for each in in_form(llm, fixed and drafted).generate(prompts, said)]


def check(got: CompletionOutput, want: Golden) -> None:
    """The reference's first forward of a block only proposes (LLaDA); ours commits what it found, and so is one commit
    ahead within a block. As many passes; the same order."""
    assert got.token_ids == want["output_ids"] == want["static_output_ids"], want["id"]
    assert got.num_forward_passes == want["nfe"] < want["static_nfe"], want["id"]
    length = want["settings"]["block_length"]
    blocks = [{pos // length for pos in each} for each in commits(got)]
    assert all(len(each) == 1 for each in blocks)


@forms
@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_what_the_reference_gave(model: str, policy: str, fixed: bool) -> None:
    """All cases of as many drafts in one batch, and each alone; without drafts as the reference without them."""
    golden = cases(model, policy)
    for num_steps in {each["settings"]["draft_steps"] for each in golden}:
        batch = [each for each in golden if each["settings"]["draft_steps"] == num_steps]
        for got, want in zip(generate(batch, policy, fixed), batch, strict=True):
            check(got, want)
    for want in golden:
        check(generate([want], policy, fixed)[0], want)
        (slow,) = generate([want], policy, fixed, drafted=False)
        assert (slow.token_ids, slow.num_forward_passes) == (want["static_output_ids"], want["static_nfe"])


def test_no_case_is_left_out() -> None:
    used = [each["id"] for model in MODELS for policy in ("dual", "prefix") for each in cases(model, policy)]
    assert sorted(used) == sorted(f"freedave-{family}-{number}" for family in ("llada", "dream") for number in range(5))


# --- the same cache without drafts


def asks(model: str, count: int, seed: int, width: int = 16, thresholds: Sequence[float] = (2.0,)) -> list[Ask]:
    """Requests with blocks up to the width, ends of text, banned ids, filters, and some tokens given."""
    r = random.Random(seed)
    out = []
    for number in range(count):
        length = r.randint(1, LONGEST - 1)
        said: dict[str, Any] = {"block_length": r.randint(1, width), "trajectory": True}
        said["threshold"] = r.choice(thresholds)
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


def mixed(model: str, count: int, seed: int, width: int = 16) -> list[Ask]:
    """One token a pass, which no probability at the threshold makes, beside thresholds that some reach."""
    return asks(model, count, seed, width, thresholds=(2.0, 0.8, 0.5, 0.3))


def answer(out: CompletionOutput) -> Any:
    """What must not depend on drafts."""
    return out.token_ids, out.finish_reason, out.stop_reason


def equal(fast: Sequence[CompletionOutput], slow: Sequence[CompletionOutput]) -> None:
    """The same answers, and every pass with drafts did what some passes without them do, whole and in order."""
    assert [answer(out) for out in fast] == [answer(out) for out in slow]
    for one, other in zip(fast, slow, strict=True):
        order = {event.position: event.num_pass for event in other.trajectory or ()}
        together = [number for each in commits(one) for number in sorted({order[pos] for pos in each})]
        assert together == sorted(set(order.values())), "in the same order"


def both(
    model: str, policy: str, requests: Sequence[Ask], num_drafts: int = 3, width: int = 16, fixed: bool = False
) -> tuple[list[CompletionOutput], list[CompletionOutput]]:
    """With drafts and without, over the same cache."""
    row = freedave(num_drafts, LONGEST if policy == "prefix" else width, policy)
    fast = serve(in_form(load(model, row), fixed), requests)
    return fast, serve(load(model, bare(f"fast-dllm-{policy}")), requests)


@forms
@pytest.mark.parametrize(("num_drafts", "width"), [(1, 16), (3, 16), (7, 8), (3, 4)])
@pytest.mark.parametrize("model", MODELS)
def test_the_answers_of_one_token_a_pass(model: str, num_drafts: int, width: int, policy: str, fixed: bool) -> None:
    fast, slow = both(model, policy, asks(model, 12, num_drafts, width), num_drafts, width, fixed)
    equal(fast, slow)
    for out in slow:
        passes = [event.num_pass for event in out.trajectory or ()]
        assert len(set(passes)) == len(passes), "one token a pass"
    num_passes = [sum(out.num_forward_passes for out in outs) for outs in (fast, slow)]
    assert num_passes[0] < num_passes[1], "drafts are accepted"


@forms
@pytest.mark.parametrize("model", MODELS)
def test_the_answers_of_a_threshold(model: str, policy: str, fixed: bool) -> None:
    """In company of other thresholds, and alone."""
    for seed, num_drafts, width in ((1, 3, 16), (2, 5, 10)):
        requests = mixed(model, 14, seed, width)
        fast, slow = both(model, policy, requests, num_drafts, width, fixed)
        equal(fast, slow)
        several = [len(each) > 1 for out, ask in zip(slow, requests) for each in commits(out) if out.trajectory]
        assert any(several), "a threshold is reached"
        num_passes = [sum(out.num_forward_passes for out in outs) for outs in (fast, slow)]
        assert num_passes[0] < num_passes[1], "drafts are accepted"
    for ask in mixed(model, 6, seed=3):
        equal(*both(model, policy, [replace(ask, arrives=0)], fixed=fixed))


def differ(model: str, policy: str, requests: Sequence[Ask]) -> bool:
    fast, slow = both(model, policy, requests)
    return [answer(out) for out in fast] != [answer(out) for out in slow]


@pytest.mark.parametrize("policy", ["dual", "prefix"])
def test_drafts_that_nobody_proves_are_noticed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is proposed is accepted."""
    verdict = Nested.verdict

    def believing(self: Nested, canvas: Canvas, *rest: Any) -> Verdict:
        found = verdict(self, canvas, *rest)
        return replace(found, accepted_SZ=canvas.pending_pos_SZ >= 0)

    monkeypatch.setattr(Nested, "verdict", believing)
    assert differ("tiny-llada", policy, asks("tiny-llada", 8, seed=1))


@pytest.mark.parametrize("policy", ["dual", "prefix"])
def test_views_that_see_the_canvas_block_are_noticed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the canvas's own rows of the block are seen beside a view's."""
    scratch = Nested.scratch

    def leaking(self: Nested, canvas: Canvas) -> Any:
        out = scratch(self, canvas)
        return replace(out, shadow_SN=torch.zeros_like(out.shadow_SN))

    monkeypatch.setattr(Nested, "scratch", leaking)
    assert differ("tiny-llada", policy, asks("tiny-llada", 8, seed=1))


def test_views_without_what_follows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: views of the block alone, which see what follows as the canvas's rows left it."""

    def short(self: Nested, canvas: Canvas) -> torch.Tensor:  # noqa: ARG001
        return canvas.block_SN == canvas.current_block_S()[:, None]

    monkeypatch.setattr(Nested, "_inside", short)
    assert differ("tiny-llada", "prefix", asks("tiny-llada", 10, seed=1, width=4))


def test_views_that_are_judged_by_the_best_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: under a threshold, a view stands although the rule would have passed it over."""
    takes = Nested._takes

    def best(self: Nested, open_SVB: Any, prob_SVB: Any, neg_doubt_SVB: Any, params: Any) -> torch.Tensor:
        return takes(self, open_SVB, torch.zeros_like(prob_SVB), neg_doubt_SVB, params)

    monkeypatch.setattr(Nested, "_takes", best)
    assert differ("tiny-llada", "dual", asks("tiny-llada", 12, seed=1, thresholds=(0.8,)))


@pytest.mark.parametrize("policy", ["dual", "prefix"])
def test_followers_that_are_not_held_back_are_noticed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: under shifted logits the first pass over a block decides anywhere in it."""
    monkeypatch.setattr(Nested, "_leading", lambda self, view: view)  # noqa: ARG005
    assert differ("tiny-dream", policy, asks("tiny-dream", 8, seed=1))


@pytest.mark.parametrize("policy", ["dual", "prefix"])
def test_views_that_score_their_own_positions_are_noticed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: under shifted logits a row's prediction is taken for its own position."""
    monkeypatch.setattr(
        Nested, "_by_position", lambda self, more_SX: more_SX.view(-1, self.num_drafts, self.block_width)
    )
    assert differ("tiny-dream", policy, asks("tiny-dream", 10, seed=1))


# --- rows


@pytest.mark.parametrize("policy", ["dual", "prefix"])
@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_rows(model: str, policy: str) -> None:
    """A block's first pass is the whole canvas; every other one the view's positions, once and for each draft."""
    prompt, length, num_drafts = 5, 20, 3
    for block in (4, 7, 16):
        said = SamplingParams(
            max_tokens=length, block_length=block, threshold=2.0, ignore_eos=True, stop_token_ids=(), trajectory=True
        )
        width = length if policy == "prefix" else block
        (out,) = serve(load(model, freedave(num_drafts, width, policy)), [Ask(made_up_prompt(prompt, 1), said)])
        num_rows, done = 0, 0
        for each in commits(out):
            start = done // block * block
            end = length if policy == "prefix" else min(start + block, length)
            left = min(start + block, length) - done
            views = 1 + min(num_drafts, left)
            num_rows += prompt + length if done == start else views * (end - start)
            done += len(each)
        assert (done, out.num_rows) == (length, num_rows)


# --- beside others


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of what may be said where drafts are nested."""
    said = continuous._said

    def kept(method: str, r: random.Random) -> dict[str, Any]:
        names = ("max_tokens", "stop_token_ids", "ignore_eos", "block_length")
        out = {name: value for name, value in said(method, r).items() if name in names}
        out["threshold"] = r.choice((2.0, 2.0, 0.5, 0.2))
        return out if out.get("block_length") else out | {"block_length": 7}

    monkeypatch.setattr(continuous, "_said", kept)


@pytest.mark.parametrize(
    ("network", "policy", "fixed"),
    [
        *((network, "dual", fixed) for network in ("llada", "llada-gqa", "dream") for fixed in (False, True)),
        *((network, "prefix", False) for network in ("llada", "dream")),
    ],
)
def test_a_crowd_is_everybody_alone(network: str, policy: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    row = replace(freedave(3, 64 if policy == "prefix" else 16, policy), name="freedave-tested")
    with registered(row):
        out = compare(row.name, network, 72 if policy == "dual" else 40, seed=3, seats=8, way=Way(fixed=fixed))
    assert not out.different
    assert out.lost_pages == 0
    assert out.most_seats > 1
    assert out.num_waits > 0 or policy == "prefix", "the budget is for views of the longest answer"


def test_the_list_of_a_pass_is_one_step_of_the_kernels() -> None:
    """The row of the table, whatever is changed in it. Over the prefix cache lists are longer and passes ragged."""
    from unmask.ops.triton.attend import LIVE_STEP

    for num_drafts, width in ((3, 16), (1, 32), (7, 8)):
        nested = load("tiny-llada", freedave(num_drafts, width)).engine.axes.drafter
        assert isinstance(nested, Nested)
        assert nested.num_scratch + nested.block_width == LIVE_STEP
    axes = load("tiny-llada", freedave(7, 32, "prefix")).engine.axes
    assert (axes.drafter.num_scratch, axes.static) == (7 * 32, False)


# --- where it would not be right


def complete(params: SamplingParams, method: Method | None = None, **advice: Any) -> SamplingParams:
    return (method or METHODS["freedave"]).complete(params, advice, {"max_tokens": 128})


@pytest.mark.parametrize(
    "said",
    [
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
    assert complete(SamplingParams(remasking="low_confidence", threshold=0.9)).threshold == 0.9
    over_prefix = freedave(3, 128, "prefix")
    assert complete(SamplingParams(), over_prefix, block_length=64).block_length == 64
    with pytest.raises(ConfigError, match="use threshold=2"):
        complete(SamplingParams(), replace(METHODS["freedave"], sampling={}))


def test_rows_that_are_no_good() -> None:
    with pytest.raises(MethodError, match=r"num_drafts=4 over block_width=16 need 80 entries .* at most 12"):
        freedave(4, 16)
    with pytest.raises(MethodError, match="num_drafts=5 do not fit block_width=4"):
        freedave(5, 4)
    for policy in ("recompute", "delayed"):
        with pytest.raises(MethodError, match=f"'nested'.*{policy!r}.*use policy 'dual' or 'prefix'"):
            replace(METHODS["freedave"], policy=policy)
    with pytest.raises(ConfigError, match=r"an answer of 128 positions is over the 64 .* larger option block_width"):
        complete(SamplingParams(), freedave(3, 64, "prefix"))


@pytest.mark.parametrize(("policy", "ahead"), [("dual", True), ("prefix", False)])
def test_views_of_your_own_that_carry_something_else(policy: str, ahead: bool) -> None:
    row = freedave(3, 16, policy)
    with pytest.raises(MethodError, match=rf"policy {policy!r} recomputes .* Nested\(\.\.\., ahead={not ahead}\)"):
        replace(row, drafter=Nested(3, 16, ahead=ahead), options={})
    right = replace(row, drafter=Nested(3, 16, ahead=not ahead), options={})
    shifted, plain = (tiny_model(name).config for name in ("tiny-dream", "tiny-llada"))
    check_weights(right, plain, allow=False)
    check_weights(row, shifted, allow=False)
    with pytest.raises(MethodError, match=r"'Nested' is for logits that are shifted by 0.*make it with shift=1"):
        check_weights(right, shifted, allow=False)
    shifts = replace(row, drafter=Nested(3, 16, ahead=not ahead, shift=1), options={})
    check_weights(shifts, shifted, allow=False)
    with pytest.raises(MethodError, match="make it with shift=0"):
        check_weights(shifts, plain, allow=False)
