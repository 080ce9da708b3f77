"""What D2F promises, held in the served engine under requests that come, go and end as they like.

The numbers are those of the list of test oracles in the method's notes; the ninth, the scheduler's, is held in
`test_scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.served import COMMON, GOLDEN, Ask, bare, drive, facts, load, serve
from oracles import decoding
from oracles.d2f import block_causal_logits, block_kv, predict
from oracles.flash import made_up_prompt
from stubs import MASK, Stub, View
from unmask import LLM, EngineError, SamplingParams
from unmask.cache.context import PagedContext
from unmask.cache.pool import PAGE_SIZE
from unmask.core.canvas import SEALED, TO_SEAL, Canvas
from unmask.core.rows import RowPlan
from unmask.decoding.frontier import FrontierView, Pipeline
from unmask.decoding.params import DecodeParams
from unmask.engine.outputs import CompletionOutput
from unmask.engine.request import Answer
from unmask.engine.step import READBACK, Look
from unmask.models.transformer import Transformer

drawn = settings(max_examples=12, deadline=None, derandomize=True)
models = pytest.mark.parametrize("model", GOLDEN)


# --- requests


@st.composite
def pipelined(draw: st.DrawFn, model: str, *, infilled: bool = True, sampled: bool = True) -> Ask:
    """A request of the pipeline: any settings, maybe guided or drawn, maybe an end of text, maybe some tokens given."""
    length, seed = draw(st.integers(1, 22)), draw(st.integers(0, 9))
    hot = draw(st.sampled_from([0.0, 0.0, 0.0, 1.0])) if sampled else 0.0
    said: dict[str, Any] = {
        "block_length": draw(st.integers(1, 9)),
        "tau_add": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "tau_act": draw(st.sampled_from([0.0, 0.4, 0.95, 1.0])),
        "threshold": draw(st.sampled_from([0.3, 0.6, 0.9, 1.0])),
        "strict_threshold": draw(st.booleans()),
        "pipeline_depth": draw(st.sampled_from([None, 1, 2])),
        "early_stop": draw(st.booleans()),
        "alg": draw(st.sampled_from([None, "topk_margin", "entropy"])),
        "temperature": hot,
        "seed": seed,
        "trajectory": True,
    }
    prompt = made_up_prompt(draw(st.sampled_from([1, 3, 8, 15, 16, 17, 21])), draw(st.integers(0, 9)))
    arrives = draw(st.integers(0, 6))
    said["cfg_scale"] = draw(st.sampled_from([0.0, 0.0, 0.0, 1.5])) if sampled else 0.0
    if infilled and draw(st.integers(0, 3)) == 0:
        holes = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        given_ = [None if hole or place == length - 1 else 11 * place % 300 for place, hole in enumerate(holes)]
        return Ask(prompt, SamplingParams(**said), tuple(given_), arrives=arrives)
    ends = COMMON[model] if draw(st.booleans()) else ()
    return Ask(prompt, SamplingParams(**said, max_tokens=length, ignore_eos=True, stop_token_ids=ends), arrives=arrives)


def batches(model: str, **options: Any) -> st.SearchStrategy[list[Ask]]:
    return st.lists(pipelined(model, **options), min_size=1, max_size=4)


# --- what the passes do


@dataclass
class Pass:
    """One pass of one seat."""

    answer: Answer
    leads: bool
    """Whether it is the request's own seat, not its guidance twin's."""
    prompt: int
    candidates: list[int]
    rows: list[int]
    hidden_RD: Tensor
    tokens: list[int]
    """Before the pass, up to the end."""
    undecided: int
    """As the step tells the host."""
    after: list[int]
    """The same tokens when it is over, up to the end as it is then."""
    committed: dict[int, tuple[int, float]]
    """Tokens and their probabilities."""
    sealed: tuple[Tensor, Tensor]
    """K and V [L, n, Hkv, hd] of the positions that are sealed by then."""


def watch(llm: LLM, before: Callable[[], object] = lambda: None) -> list[Pass]:
    """All passes from now on; ``before`` is called at the start of each."""
    program, passes = llm.engine.step_program, list[Pass]()
    run, forward = program.run, program._forward

    def spy(look: Look) -> None:
        before()
        canvas, kept = program.canvas, list[tuple[RowPlan, Tensor]]()

        def spy_forward(plan: RowPlan, counts_M: Tensor | None = None) -> tuple[Tensor, PagedContext]:
            hidden_MD, context = forward(plan, counts_M)
            kept.append((plan, hidden_MD))
            return hidden_MD, context

        program._forward = spy_forward  # type: ignore[method-assign]
        running = [(answer, seat) for answer in llm.engine.scheduler.running for seat in answer.seats]
        running = [(answer, seat) for answer, seat in running if canvas.active_S[answer.seat]]
        token_SN, end_S, final_SN = canvas.token_SN.clone(), canvas.end_S.tolist(), canvas.final_SN.clone()
        run(look)
        plan, hidden_MD = kept[0]
        for answer, seat in running:
            mine_M = plan.seat_M == seat
            end = int(canvas.end_S[answer.seat])  # a twin's too
            new = [int(n) for n in (canvas.final_SN[seat] & ~final_SN[seat]).nonzero()[:, 0]]
            passes.append(
                Pass(
                    answer=answer,
                    leads=seat == answer.seat,
                    prompt=len(answer.prompt_ids),
                    candidates=[int(n) for n in look.view.candidate_SN[seat].nonzero()[:, 0]],
                    rows=plan.pos_M[mine_M].tolist(),
                    hidden_RD=hidden_MD[mine_M],
                    tokens=token_SN[seat, : end_S[answer.seat]].tolist(),
                    undecided=int(program.readback[seat, READBACK.index("num_undecided")]),
                    after=canvas.token_SN[seat, :end].tolist(),
                    committed={n: (int(canvas.token_SN[seat, n]), float(canvas.commit_prob_SN[seat, n])) for n in new},
                    sealed=sealed_kv(llm, answer, seat),
                )
            )

    program.run = spy  # type: ignore[method-assign]
    return passes


def sealed_kv(llm: LLM, answer: Answer, seat: int) -> tuple[Tensor, Tensor]:
    """What the pool holds for the run of sealed blocks. A twin's blocks are its leader's."""
    canvas, pool = llm.engine.canvas, llm.engine.pool
    state_N = canvas.block_state_SK[answer.seat][canvas.block_SN[answer.seat].long()]
    inside_N = canvas.pos_1N()[0] < canvas.end_S[seat]
    stop = int((((state_N == SEALED) & inside_N).int().cumprod(0)).sum())
    pos_n = torch.arange(stop)
    entry_n = pool.page_table_SP[seat].long()[pos_n // PAGE_SIZE] * PAGE_SIZE + pos_n % PAGE_SIZE
    return pool.k[:, entry_n].clone(), pool.v[:, entry_n].clone()


def block_of(each: Pass) -> int:
    return each.answer.block_length or len(each.answer.answer_ids)


def network(llm: LLM) -> Transformer:
    assert isinstance(llm.model, Transformer)
    return llm.model


def by_seat(passes: Sequence[Pass]) -> list[list[Pass]]:
    """The passes of each request, its own and its twin's apart."""
    told: dict[tuple[Answer, bool], list[Pass]] = {}
    for each in passes:
        told.setdefault((each.answer, each.leads), []).append(each)
    return list(told.values())


# --- the promises


def sealed_kv_is_that_of_the_final_text(llm: LLM, passes: Sequence[Pass]) -> int:
    """1. K/V that a pass sealed never change again, and are those of a fresh forward of prompt and final text."""
    compared = 0
    for own in by_seat(passes):
        for one, other in pairwise(own):
            for old, new in zip(one.sealed, other.sealed):
                assert torch.equal(new[:, : old.shape[1]], old)
        last = own[-1]
        exact = zip(*block_kv(network(llm), last.after, last.prompt, block_of(last)))
        for mine, theirs in zip(last.sealed, exact):
            theirs_L = torch.stack(theirs)[:, : mine.shape[1]]
            torch.testing.assert_close(mine, theirs_L, atol=1e-9, rtol=1e-9)
        compared += last.sealed[0].shape[1] > last.prompt
    return compared


def rows_are_those_of_a_whole_forward(llm: LLM, passes: Sequence[Pass]) -> int:
    """2. What a pass says of its rows is what a forward of everything says, in which each block sees what it may."""
    for each in passes:
        exact_NV = block_causal_logits(network(llm), each.tokens, each.prompt, block_of(each))
        with torch.inference_mode():
            mine_RV = each.hidden_RD @ llm.model.head.T
        torch.testing.assert_close(mine_RV, exact_NV[each.rows], atol=1e-9, rtol=1e-9)
    return sum(len(each.rows) < len(each.tokens) for each in passes)


def undecided_is_what_is_masked(llm: LLM, passes: Sequence[Pass]) -> int:
    """6. The count that ends a request is that of MASK on its canvas, and falls in every step."""
    mask = llm.model.config.mask_token_id
    own = [each for each in passes if each.leads]
    for each in own:
        assert each.undecided == each.after.count(mask)
        assert set(each.candidates) <= {n for n, token in enumerate(each.tokens) if token == mask}
        assert {each.tokens[n] for n in each.committed} == ({mask} if each.committed else set())
    return sum(0 < each.undecided < each.tokens.count(mask) for each in own)


def every_step_decides(llm: LLM, passes: Sequence[Pass]) -> int:  # noqa: ARG001
    """8. At least one token of every request, in every step. (Of infilling, where there is a hole in reach: a block of
    given tokens takes its two passes like others.)"""
    own = [each for each in passes if each.leads]
    for each in own:
        assert each.committed or not each.candidates
        assert each.candidates or any(token != each.tokens[-1] for token in each.answer.answer_ids)
    return len(own)


Promise = Callable[[LLM, Sequence[Pass]], int]
PROMISES: list[Promise] = [
    sealed_kv_is_that_of_the_final_text,
    rows_are_those_of_a_whole_forward,
    undecided_is_what_is_masked,
    every_step_decides,
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@models
def test_promises(model: str, promise: Promise) -> None:
    examples = []

    @drawn
    @given(batches(model))
    def check(asks: list[Ask]) -> None:
        llm = load(model, bare("d2f"))
        passes = watch(llm)
        drive(llm, asks)
        examples.append(promise(llm, passes))

    check()
    assert sum(examples) > 10, "the interesting case does happen"


@models
def test_a_twin_ends_where_its_leader_does(model: str) -> None:
    """1 and 2 for guided requests with an end of text that is decided before what comes before it."""
    said: dict[str, Any] = {"block_length": 5, "threshold": 0.5, "tau_act": 0.5, "cfg_scale": 1.0, "trajectory": True}
    params, asks = SamplingParams(**said, max_tokens=20, ignore_eos=True), list[Ask]()
    free = [Ask(made_up_prompt(9, seed), params) for seed in range(5)]
    for ask, out in zip(free, serve(load(model, bare("d2f")), free)):
        early = [b for a, b in pairwise(out.trajectory or ()) if b.num_pass < a.num_pass]
        asks += [replace(ask, params=params.replace(stop_token_ids=(event.token_id,))) for event in early[:1]]
    llm = load(model, bare("d2f"))
    passes = watch(llm)
    drive(llm, asks)
    sealed_kv_is_that_of_the_final_text(llm, passes)
    rows_are_those_of_a_whole_forward(llm, passes)
    assert any(len(each.after) < len(each.tokens) and each.undecided for each in passes if each.leads), "it comes early"


class SealedAtOnce(Pipeline):
    """A block is left alone as soon as it is complete, without the pass that runs it with all of its tokens."""

    def retire(self, canvas: Canvas, params: DecodeParams) -> None:
        super().retire(canvas, params)
        canvas.block_state_SK.masked_fill_(canvas.block_state_SK == TO_SEAL, SEALED)


class SeesAhead(Pipeline):
    """Rows see the blocks in flight behind their own."""

    def _see(self, canvas: Canvas) -> Tensor:
        return super()._see(canvas).amax(1, keepdim=True).expand_as(canvas.token_SN)


class CommitsMask(Pipeline):
    """What is undecided is found by what was never committed, and MASK is committed: the counts part."""

    def retire(self, canvas: Canvas, params: DecodeParams) -> None:
        canvas.token_SN.masked_fill_(canvas.commit_pass_SN == 2, canvas.mask_token_id)
        super().retire(canvas, params)


class NoRescue(Pipeline):
    """Nobody is promised a commit."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        view = super().advance(canvas, params)
        return replace(view, rescue_group_SN=torch.full_like(view.rescue_group_SN, -1))


@pytest.mark.parametrize(
    ("promise", "fault"),
    list(zip(PROMISES, (SealedAtOnce, SeesAhead, CommitsMask, NoRescue))),
    ids=lambda each: each.__name__,
)
def test_a_broken_promise_is_noticed(promise: Promise, fault: type[Pipeline]) -> None:
    params = SamplingParams(max_tokens=20, block_length=5, threshold=0.8, tau_act=0.5, early_stop=True)
    llm = load("tiny-llada", bare("d2f"))
    llm.engine.step_program.frontier = fault()
    passes = watch(llm)
    asks = [Ask(made_up_prompt(9, seed), params) for seed in range(3)]
    with pytest.raises((AssertionError, EngineError)):
        keeps(promise, llm, passes, asks)


def keeps(promise: Promise, llm: LLM, passes: Sequence[Pass], asks: Sequence[Ask]) -> None:
    drive(llm, asks, limit=60)
    promise(llm, passes)


@pytest.mark.parametrize("shift", [0, 1])
def test_mask_is_never_decided_on(shift: int) -> None:
    """6, for a network that finds MASK the likeliest by far."""
    llm = load(Stub(lambda view: {MASK: 0.9, 7 + view.position % 3: 0.09}, shift=shift), bare("d2f"))
    passes = watch(llm)
    params = SamplingParams(max_tokens=11, block_length=4, threshold=0.05, tau_act=0.5)
    outs = serve(llm, [Ask((1, 2, 3), params), Ask((4,) * 5, params.replace(threshold=0.5))])
    assert undecided_is_what_is_masked(llm, passes) > 5
    for start, out in zip((3, 5), outs):
        assert out.token_ids == [7 + position % 3 for position in range(start, start + 11)]


# --- 3 and 4: shares of one


@models
def test_shares_of_one_are_one_token_a_step(model: str) -> None:
    """One block after the other, the most confident position of each step; with a block as long as the answer that is
    plain low-confidence sampling under the block-causal mask."""
    weights, under_the_full_mask, got = network(load(model, bare("d2f"))), list[list[int]](), list[list[int]]()

    @drawn
    @given(st.integers(1, 17), st.integers(1, 14), st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 9))
    def check(length: int, max_tokens: int, block: int, whole: bool, ends: bool, seed: int) -> None:
        prompt, block = made_up_prompt(length, seed), max_tokens + block if whole else block
        shares = dict.fromkeys(("tau_add", "tau_act", "threshold"), 1.0)
        plain = SamplingParams(
            max_tokens=max_tokens,
            block_length=block,
            threshold=2.0,  # nothing is so likely: the best one is left
            ignore_eos=True,
            stop_token_ids=COMMON[model] if ends else (),
        )
        params = plain.replace(**shares, strict_threshold=True, trajectory=True)
        (out,) = serve(load(model, bare("d2f")), [Ask(prompt, params)])

        def logits(canvas: Sequence[int]) -> Tensor:
            return block_causal_logits(weights, canvas, length, block)

        family = decoding.family_of(weights)
        want = decoding.decode(logits, family, prompt, plain)
        assert (out.token_ids, out.finish_reason) == (want.token_ids, want.finish_reason)
        assert out.num_steps == out.num_forward_passes == want.num_passes
        assert commits(out) == [(each.position, each.token_id, each.num_pass) for each in want.commits]
        full = decoding.network_of(weights)
        under_the_full_mask.append(decoding.decode(full, family, prompt, plain).token_ids)
        got.append(out.token_ids)

    check()
    assert under_the_full_mask != got, "the mask matters"


def commits(out: CompletionOutput) -> list[tuple[int, int, int]]:
    return [(event.position, event.token_id, event.num_pass) for event in out.trajectory or ()]


def test_smaller_shares_are_several_tokens_a_step() -> None:
    """Negative control."""
    said: dict[str, Any] = {"max_tokens": 12, "block_length": 4, "threshold": 1.0, "strict_threshold": True}
    for tau, one_each in ((1.0, True), (0.2, False)):
        params = SamplingParams(**said, tau_add=tau, tau_act=tau, ignore_eos=True)
        (out,) = serve(load("tiny-llada", bare("d2f")), [Ask(made_up_prompt(9, 1), params)])
        assert (out.num_steps == 12) == one_each


# --- 5: neighbours


@models
def test_batched_is_solo(model: str) -> None:
    @drawn
    @given(batches(model))
    def check(asks: list[Ask]) -> None:
        together = serve(load(model, bare("d2f"), enable_prefix_caching=False), asks)
        assert [facts(each) for each in together] == solo(model, asks)

    check()


def solo(model: str, asks: Sequence[Ask]) -> list[Any]:
    return [
        facts(serve(load(model, bare("d2f"), enable_prefix_caching=False), [replace(ask, arrives=0)])[0])
        for ask in asks
    ]


class SharesOfSeatZero(Pipeline):
    """Every seat adds blocks by the share of seat 0's request."""

    def _add(self, canvas: Canvas, params: DecodeParams) -> None:
        own_S = params.tau_add_S.clone()
        params.tau_add_S.copy_(own_S[:1].expand_as(own_S))
        super()._add(canvas, params)
        params.tau_add_S.copy_(own_S)


def test_a_neighbours_parameter_is_noticed() -> None:
    params = SamplingParams(max_tokens=18, block_length=4, threshold=0.8, tau_add=0.1, trajectory=True)
    asks = [Ask(made_up_prompt(9, n), params.replace(tau_add=tau)) for n, tau in enumerate((1.0, 0.1, 0.5))]
    llm = load("tiny-llada", bare("d2f"), enable_prefix_caching=False)
    llm.engine.step_program.frontier = SharesOfSeatZero()
    assert [facts(each) for each in serve(llm, asks)] != solo("tiny-llada", asks)


# --- 7: Dream's saved row


def test_the_first_token_of_a_block_is_scored_from_the_saved_row() -> None:
    """Once the block before it is sealed, its row is not run any more, and says what a fresh forward would."""
    used = 0

    @drawn
    @given(batches("tiny-dream", sampled=False, infilled=False))
    def check(asks: list[Ask]) -> None:
        nonlocal used
        llm = load("tiny-dream", bare("d2f"))
        passes = watch(llm)
        drive(llm, asks)
        for each in passes:
            for n, (token, prob) in each.committed.items():
                if each.leads and n and n - 1 not in each.rows:
                    logits_NV = block_causal_logits(network(llm), each.tokens, each.prompt, block_of(each))
                    want = predict(logits_NV[n - 1], n, llm.model.config.mask_token_id)
                    assert token == want.token
                    assert prob == pytest.approx(want.probability, abs=1e-6)
                    used += 1

    check()
    assert used > 3


@pytest.mark.parametrize("keeps", [True, False])
def test_without_the_saved_row_other_tokens_come_out(keeps: bool) -> None:
    """Negative control: zeros in its place."""
    llm = load("tiny-dream", bare("d2f"))
    program = llm.engine.step_program
    passes = watch(llm, before=lambda: None if keeps else program.saved_SD.zero_())
    params = SamplingParams(max_tokens=24, block_length=5, threshold=0.8, ignore_eos=True, trajectory=True)
    asks = [Ask(made_up_prompt(12, seed), params) for seed in range(3)]
    got = serve(llm, asks)
    assert any(each.candidates[0] - 1 not in each.rows for each in passes)
    want = serve(load("tiny-dream", bare("d2f-uncached")), asks)
    assert ([each.token_ids for each in got] == [each.token_ids for each in want]) == keeps


def test_the_saved_row_has_seen_what_is_before_the_block() -> None:
    """The script says how far the row that speaks for a position sees: for the first of a block, to the block's start.

    It is the least sure of all, so that it is decided when the block before it has long been sealed."""

    def script(view: View) -> dict[int, float]:
        first = view.position == len(view.canvas)
        return {len(view.canvas): 0.3 if first else 0.95}

    llm = load(Stub(script, shift=1), bare("d2f"))
    passes = watch(llm)
    params = SamplingParams(max_tokens=12, block_length=4, threshold=0.9, tau_add=0.5, tau_act=0.5)
    (out,) = serve(llm, [Ask((1, 2, 3), params)])
    assert out.token_ids == [3, 7, 7, 7, 7, 11, 11, 11, 11, 15, 15, 15]
    assert sum(n - 1 not in each.rows for each in passes for n in each.committed) >= 1
