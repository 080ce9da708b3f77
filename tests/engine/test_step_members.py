"""What single members promise inside a step: verification in a second pass, the block pipeline and its cache, nested
drafts, tracking. Every promise comes with a control that breaks it.

L layers, S seats, N positions, D hidden size, K searched positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.fixed import (
    BlockCausal,
    Blocks,
    Case,
    Dual,
    Nested,
    Pipeline,
    Result,
    TwoPass,
    make_pool,
    make_step,
    result,
    run,
)
from engine.watched import (
    COMMON_TOKENS,
    DRAFTS,
    ENDING,
    KINDS,
    MASKS,
    MODELS,
    NUM_ROWS,
    NUM_SEARCH,
    TRACKED,
    TWO_SEATS,
    WEIGHED,
    Forgetting,
    Kind,
    Pass,
    alone,
    both_forms,
    changed_to,
    column,
    drawn,
    entries_of,
    first_verification,
    isolated,
    one_a_pass,
    one_layer,
    request,
    tiny,
    trace,
    two_pass,
    verify_passes,
    verifying,
    watch,
    watched_run,
)
from unmask.cache.context import MassSpec
from unmask.cache.policy import Tracked
from unmask.core import layout
from unmask.core.canvas import FULL, OPEN, SEALED, Canvas
from unmask.decoding.drafter import Drafter
from unmask.decoding.frontier import FrontierView, Window
from unmask.decoding.params import NO_LIMIT, DecodeParams
from unmask.engine.step import Budgets, Step
from unmask.errors import ConfigError
from unmask.models.attention import AttentionWeights, DenseContext
from unmask.models.transformer import Transformer

# --- context and search of the second pass


@both_forms
def test_context_rows_are_the_latest_commits(fixed: bool) -> None:
    """What a step's first pass has just committed is live in its second: on the canvas its K/V are those of MASK."""
    cases = [request(5, 16, 16, seed, rule={"threshold": 0.97}) for seed in range(3)]
    step = make_step(tiny(), cases, drafter=two_pass(), fixed=fixed)
    passes = watch(step)
    run(step, cases)
    num_live = 0
    for first, second in pairwise(passes):
        for seat in range(len(cases) if second.verifies else 0):
            new = (first.token_SN[seat] != second.token_SN[seat]).nonzero().flatten().tolist()
            context = context_of(second, seat)
            assert not context or new[: len(context)] == context[: len(new)]
            num_live += len(context) > 0
    assert num_live > 10


def context_of(each: Pass, seat: int) -> list[int]:
    """Positions of the context, which fills its columns from the left."""
    at = each.scratch_rows(seat, 0, DRAFTS)
    rows = [row for row in at if row >= 0]
    assert at == rows + [-1] * (DRAFTS - len(rows))
    return each.plan.pos_M[rows].tolist()


def context_by_loop(each: Pass, seat: int) -> list[int]:
    """The definition: this step's commits, the last step's, both from the left, and the rest by mass, leftmost on
    ties; two rows a searched position are not the context's."""
    num_searched = sum(row >= 0 for row in each.scratch_rows(seat, DRAFTS, NUM_SEARCH))
    now, decided = int(each.pass_S[seat]), range(int(each.end_S[seat]))
    decided_at = {pos: int(each.commit_pass_SN[seat, pos]) for pos in decided if each.final_SN[seat, pos]}
    just, before = ([pos for pos, when in decided_at.items() if when == now - ago > 0] for ago in (0, 1))
    rest = [pos for pos in decided_at if pos not in {*just, *before}]
    rest.sort(key=lambda pos: -float(each.mass_SN[seat, pos]))
    return [*just, *before, *rest][: max(NUM_ROWS - 2 * num_searched, 0) if num_searched else 0]


SEARCHING = {
    "two-pass": Kind([*TWO_SEATS, *ENDING]),
    "flash": Kind(TRACKED * 2, lambda: {"frontier": Window(), "policy": Tracked(MassSpec(first_layer=1))}),
}


@both_forms
@pytest.mark.parametrize("kind", SEARCHING)
def test_context_and_search_are_those_of_the_definition(kind: str, fixed: bool) -> None:
    """Each request searches as many positions as it asks for, if there are any, and has context in the other rows."""
    cases = [changed_to(e, search=k, window=6) for e, k in zip(SEARCHING[kind].cases, (1, 2, NO_LIMIT, 3))]
    most, num_compared = [0] * len(cases), 0
    members = SEARCHING[kind].members()
    for each in verify_passes(watched_run(tiny(), cases, drafter=two_pass(), **members, fixed=fixed)):
        for seat in range(len(cases)):
            assert context_of(each, seat) == context_by_loop(each, seat)
            num_searched = sum(row >= 0 for row in each.scratch_rows(seat, DRAFTS, NUM_SEARCH))
            most[seat] = max(most[seat], num_searched)
            num_compared += len(set(each.mass_SN[seat].tolist())) > 2 and num_searched > 0
    assert most == [1, 2, NUM_SEARCH, 3]
    assert num_compared > 10


def test_context_by_position_is_not_that_by_mass() -> None:
    """Negative control: the definition notices a context that is taken from the right."""
    cases, members = SEARCHING["flash"].cases, SEARCHING["flash"].members()
    passes = verify_passes(watched_run(tiny(), cases, drafter=two_pass(), **members))
    rightmost = [replace(each, mass_SN=torch.arange(each.capacity).expand_as(each.mass_SN)) for each in passes]
    assert any(context_of(each, 0) != context_by_loop(each, 0) for each in rightmost)


# --- isolation of the second pass


@torch.inference_mode()
def mask_rows(step: Step, each: Pass, changed_draft: int | None = None, *, of: int = 0, seat: int = 0) -> Tensor:
    """Hidden rows [K, D] of a seat's MASK rows when the pass is made again, with another token in a draft."""
    step.pool.k.copy_(each.before[0])
    step.pool.v.copy_(each.before[1])
    token_M = each.plan.token_M.clone()
    if changed_draft is not None:
        (row,) = each.scratch_rows(of, DRAFTS + changed_draft, 1)
        token_M[row] = (token_M[row] + 7) % 300
    hidden_MD, _ = step._forward(replace(each.plan, token_M=token_M))
    return hidden_MD[each.scratch_rows(seat, MASKS, NUM_SEARCH)].clone()


@both_forms
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_strict_isolation_hides_a_draft_from_all_rows_up_to_its_own(name: str, dtype: str, fixed: bool) -> None:
    """Another token in draft k leaves the MASK rows 0..k bit-equal, and reaches every later one."""
    step, each = first_verification(tiny(name, dtype), strict=True, fixed=fixed)
    before = mask_rows(step, each)
    for k in range(NUM_SEARCH):
        after = mask_rows(step, each, changed_draft=k)
        assert torch.equal(after[: k + 1], before[: k + 1]), k
        assert (after[k + 1 :] != before[k + 1 :]).any(-1).all()


@both_forms
def test_the_references_isolation_leaks_from_the_second_layer_on(fixed: bool) -> None:
    """Negative control: live MASK rows of later positions carry draft k back to its own row, except for the last k."""
    step, each = first_verification(tiny(), strict=False, fixed=fixed)
    before = mask_rows(step, each)
    for k in range(NUM_SEARCH):
        own = mask_rows(step, each, changed_draft=k)[k]
        assert torch.equal(own, before[k]) == (k == NUM_SEARCH - 1), k


@both_forms
def test_in_one_batch_only_the_request_that_asks_for_it_leaks(fixed: bool) -> None:
    """Two requests in strict isolation, two in the reference's; and no draft reaches another request."""
    strict = (True, False, False, True)
    step, each = first_verification(tiny(), strict, fixed=fixed)
    for of in range(len(strict)):
        for seat in range(len(strict)):
            before = mask_rows(step, each, seat=seat)
            for k in range(NUM_SEARCH - 1):
                after = mask_rows(step, each, k, of=of, seat=seat)
                if seat == of:
                    assert torch.equal(after[k], before[k]) == strict[seat], (seat, k)
                else:
                    assert torch.equal(after, before), (of, seat, k)


@pytest.mark.parametrize("strict", [True, False])
def test_on_one_layer_no_isolation_leaks(strict: bool) -> None:
    """What a row reads was made from tokens only, so both isolations hide draft k from rows 0..k."""
    step, each = first_verification(one_layer(), strict)
    before = mask_rows(step, each)
    for k in range(NUM_SEARCH):
        assert torch.equal(mask_rows(step, each, changed_draft=k)[: k + 1], before[: k + 1])


@torch.inference_mode()
def sequential_conditionals(model: Transformer, each: Pass) -> Tensor:
    """Hidden rows [K, D] of dense forwards: MASK at position i, the drafts before i placed, one forward for each i."""
    end = int(each.end_S[0])
    token_N, rows = each.token_SN[0, :end].long(), []
    for row in each.scratch_rows(0, DRAFTS, NUM_SEARCH):
        pos = int(each.plan.pos_M[row])
        assert token_N[pos] == model.config.mask_token_id
        rows.append(model(token_N[None], DenseContext(torch.arange(end), rope=model.rope))[0, pos])
        token_N = token_N.clone()
        token_N[pos] = each.plan.token_M[row]
    return torch.stack(rows)


@pytest.mark.parametrize("strict", [True, False])
def test_on_one_layer_a_mask_row_is_the_sequential_conditional(strict: bool) -> None:
    """Where K/V depend on nothing but token and position, verification asks exactly what one token a pass would."""
    step, each = first_verification(one_layer(), strict)
    torch.testing.assert_close(mask_rows(step, each), sequential_conditionals(one_layer(), each), atol=1e-10, rtol=0)


def test_on_three_layers_a_mask_row_is_not_quite_the_sequential_conditional() -> None:
    """Negative control: K/V of deeper layers were made under other views, so the equality above is not trivial."""
    step, each = first_verification(tiny(), strict=True)
    assert (mask_rows(step, each) - sequential_conditionals(tiny(), each)).abs().amax() > 1e-6


# --- verification that accepts nothing, and one that does


@both_forms
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gamma_above_one_is_no_verification(name: str, strict: bool, fixed: bool) -> None:
    """The second pass alone changes nothing: same tokens, same passes, same pass of every commit."""
    cases = [request(prompt, 16, 8, eos=eos, gamma=2.0) for prompt in (1, 7, 20) for eos in ((), COMMON_TOKENS)]
    cases = [changed_to(each, product=number % 2 > 0) for number, each in enumerate(isolated(cases, strict))]
    plain = run(make_step(tiny(name), cases, fixed=fixed), cases)
    step = make_step(tiny(name), cases, drafter=two_pass(), fixed=fixed)
    told = trace(step)
    assert [result(step, seat, each) for seat, each in enumerate(cases)] == plain
    assert not any(column(each, "num_accepted").any() for each in told)


def test_a_small_gamma_accepts_drafts_and_saves_steps() -> None:
    """Control of the equality above: below one, drafts are accepted, told, and the run is shorter."""
    each = request(7, 24, 12, gamma=0.2)
    slow = alone(tiny(), each)
    step = make_step(tiny(), [each], drafter=two_pass())
    told = trace(step)
    assert sum(int(column(readback, "num_accepted")) for readback in told) > 5
    assert len(told) < slow.num_passes - 5
    assert len(told) == result(step, 0, each).num_passes


# --- D2F's pipeline


@st.composite
def pipelined(draw: st.DrawFn) -> Case:
    """A request of the block pipeline; the last block may be shorter, an end of text may come."""
    return request(
        draw(st.integers(0, 20)),
        draw(st.integers(1, 18)),
        draw(st.integers(1, 8)),
        draw(st.integers(0, 9)),
        eos=draw(st.sampled_from([(), COMMON_TOKENS])),
        rule={"threshold": draw(st.sampled_from([0.3, 0.6, 0.9, 1.0]))},
        tau_add=draw(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0])),
        tau_act=draw(st.sampled_from([0.1, 0.5, 0.95, 1.0])),
        depth=draw(st.sampled_from([1, 2, 1 << 30])),
        strict=draw(st.booleans()),
    )


def pipeline_step(model: Transformer, cases: Sequence[Case], *, cached: bool = True, fixed: bool = True) -> Step:
    members: dict[str, Any] = {"policy": BlockCausal()} if cached else {}
    return make_step(model, cases, frontier=Pipeline(), **members, fixed=fixed)


@drawn
@given(st.lists(pipelined(), min_size=1, max_size=4), st.sampled_from((*MODELS, "tiny-dream")), st.booleans())
def test_the_block_causal_cache_is_exact(cases: list[Case], name: str, fixed: bool) -> None:
    """Cached and uncached runs under the same mask agree in tokens, passes and the order of commits."""
    cached, uncached = (pipeline_step(tiny(name), cases, cached=cached, fixed=fixed) for cached in (True, False))
    assert run(cached, cases) == run(uncached, cases)


GUIDED_BLOCKS = [
    request(6, 12, 3, 1, rule=WEIGHED, tau_add=0.3, tau_act=0.6),
    request(3, 9, 2, 2, rule=WEIGHED, tau_add=0.5, depth=2),
    request(4, 8, 4, 3, tau_add=0.5),
]


@both_forms
@pytest.mark.parametrize("name", [*MODELS, "tiny-dream"])
def test_the_block_causal_cache_is_exact_for_guided_requests(name: str, fixed: bool) -> None:
    """Also where the row that scores the first position of a block, and that of its twin, are kept from earlier."""
    cached, uncached = (
        pipeline_step(tiny(name), GUIDED_BLOCKS, cached=cached, fixed=fixed) for cached in (True, False)
    )
    assert run(cached, GUIDED_BLOCKS) == run(uncached, GUIDED_BLOCKS)


def test_a_twin_without_its_kept_row_is_noticed() -> None:
    """Negative control."""
    plain = run(pipeline_step(tiny("tiny-dream"), GUIDED_BLOCKS), GUIDED_BLOCKS)
    step = pipeline_step(tiny("tiny-dream"), GUIDED_BLOCKS)
    with torch.inference_mode():
        while step.canvas.active_S.any():
            step()
            step.saved_SD[[1, 3]] = 0
    assert [result(step, seat, each) for seat, each in zip((0, 2, 4), GUIDED_BLOCKS)] != plain


class Keeping(DenseContext):
    """A dense context that keeps K and V of every layer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def project(self, layer: int, hidden: Tensor, weights: AttentionWeights) -> Tensor:
        q = super().project(layer, hidden, weights)
        assert self._kv is not None
        self.kept.append(self._kv)
        return q


def fresh_kv(model: Transformer, token_N: Tensor, prompt: int, block: int) -> tuple[Tensor, Tensor]:
    """K and V [L, N, Hkv, hd] of one block-causal forward."""
    block_N = layout.blocks(len(token_N), prompt, block)
    ctx = Keeping(torch.arange(len(token_N)), mask=block_N[:, None] >= block_N[None, :], rope=model.rope)
    model(token_N[None], ctx)
    k, v = zip(*ctx.kept)
    return torch.stack(k)[:, 0], torch.stack(v)[:, 0]


def sealed_positions(step: Step, seat: int) -> Tensor:
    """bool [N]"""
    canvas = step.canvas
    state_N = canvas.block_state_SK[seat].gather(0, canvas.block_SN[seat].long())
    return (state_N == SEALED) & (canvas.pos_1N()[0] < canvas.end_S[seat])


@torch.inference_mode()
def assert_sealed(step: Step, cases: Sequence[Case], model: Transformer) -> int:
    """K/V of sealed blocks against a fresh forward over prompt and answer; how many positions that were."""
    compared = 0
    for seat, each in enumerate(cases):
        token_N = step.canvas.token_SN[seat, : step.canvas.end_S[seat]].long()
        sealed = sealed_positions(step, seat)[: len(token_N)].nonzero().flatten()
        compared += len(sealed)
        fresh = fresh_kv(model, token_N, len(each.prompt), each.block_length)
        for ours, exact in zip((step.pool.k, step.pool.v), fresh):
            torch.testing.assert_close(ours[:, entries_of(step, seat)[sealed]], exact[:, sealed], atol=1e-5, rtol=0)
    return compared


@drawn
@given(st.lists(pipelined(), min_size=1, max_size=3), st.booleans())
def test_every_step_of_the_pipeline_keeps_its_promises(cases: list[Case], fixed: bool) -> None:
    """Each step commits something for every request in it, blocks in flight stay within the depth, the count of
    undecided positions is that of MASK tokens, sealed entries never change again, and they are exact."""
    step = pipeline_step(tiny(), cases, fixed=fixed)
    passes, canvas = watch(step), step.canvas
    depth_S1, sealed_before = step.params.depth_S[:, None], [sealed_positions(step, s) for s in range(len(cases))]
    with torch.inference_mode():
        while canvas.active_S.any():
            active_S, end_S, final_S = canvas.active_S.clone(), canvas.end_S.clone(), canvas.final_SN.sum(1)
            before = step.pool.k.clone(), step.pool.v.clone()
            step()
            assert torch.equal(canvas.final_SN.sum(1) > final_S, active_S)
            assert (canvas.end_S <= end_S).all()
            state_SK = passes[-1].block_state_SK
            assert (((state_SK == OPEN) | (state_SK == FULL)).sum(1, keepdim=True) <= depth_S1).all()
            masks_SN = (canvas.token_SN == canvas.mask_token_id) & (canvas.pos_1N() < canvas.end_S[:, None])
            told_S = column(step.readback, "num_undecided")
            assert torch.equal(masks_SN.sum(1)[active_S], told_S[active_S].long())
            for seat, sealed_N in enumerate(sealed_before):
                at = entries_of(step, seat)[sealed_N]
                for old, new in zip(before, (step.pool.k, step.pool.v)):
                    assert torch.equal(old[:, at], new[:, at])
            sealed_before = [sealed_positions(step, seat) for seat in range(len(cases))]
    assert_sealed(step, cases, tiny())


def test_sealed_entries_of_a_finished_block_only_are_exact() -> None:
    """Sealing takes one more pass. Negative control: K/V right after the last commit of a block are not final."""
    each = request(7, 18, 6, rule={"threshold": 0.9})
    step = pipeline_step(tiny(), [each])
    run(step, [each])
    assert assert_sealed(step, [each], tiny()) >= 7 + 6
    step.canvas.block_state_SK[0, :4] = SEALED  # the last block has just been filled, and was not run again
    with pytest.raises(AssertionError):
        assert_sealed(step, [each], tiny())


def test_a_block_that_is_full_before_its_predecessor_waits_for_it() -> None:
    """It stays in flight, since its K/V still depend on what the predecessor becomes; sealed in order, all is exact."""
    cases = [
        request(7, 16, 5, seed, rule={"threshold": 0.7}, tau_add=0.0, tau_act=0.3, strict=True) for seed in range(8)
    ]
    step = pipeline_step(tiny(), cases)
    passes = watch(step)
    assert run(step, cases) == run(pipeline_step(tiny(), cases, cached=False), cases)
    assert_sealed(step, cases, tiny())
    waited = 0
    for each in passes:
        for seat in range(len(cases)):
            open_blocks = each.block_SN[seat][each.token_SN[seat] == step.canvas.mask_token_id].tolist()
            unfinished = min(open_blocks, default=99)
            state_K = each.block_state_SK[seat]
            for block in range(unfinished + 1, len(state_K)):
                assert state_K[block] <= FULL
                waited += block not in open_blocks and bool(state_K[block] >= OPEN)
    assert waited > 5


class BlocksInOrder(Blocks):
    """The plain frontier under the pipeline's mask: rows see up to the end of their own block."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        view = super().advance(canvas, params)
        exists_SN = canvas.visible_SN()
        not_later_SNN = canvas.block_SN[:, None, :] <= canvas.block_SN[:, :, None]
        return replace(view, see_SN=(not_later_SNN & exists_SN[:, None, :]).sum(2).int())


@drawn
@given(st.integers(0, 20), st.integers(1, 14), st.integers(1, 6), st.integers(0, 9))
def test_shares_of_one_are_one_token_a_pass(prompt: int, length: int, block: int, seed: int) -> None:
    """A block is added when the last is full and nothing passes the threshold: one commit a pass, block after block,
    the tokens and the order of the plain frontier under the same mask without a cache."""
    said: dict[str, Any] = {"rule": {"threshold": 1.0}, "strict": True}
    each = request(prompt, length, block, seed, **said, tau_add=1.0, tau_act=1.0)
    got = alone(tiny(), each, frontier=Pipeline(), policy=BlockCausal())
    assert got == alone(tiny(), each, frontier=BlocksInOrder())
    assert got.num_passes == length
    in_order = [sorted(got.commit_pass[start : start + block]) for start in range(0, length, block)]
    assert [number for numbers in in_order for number in numbers] == list(range(1, length + 1))


def test_low_shares_are_not_one_token_a_pass() -> None:
    """Negative control: with an early start of the next block two blocks commit in one pass."""
    each = request(7, 12, 4, rule={"threshold": 1.0}, strict=True, tau_add=0.0, tau_act=0.0)
    assert alone(tiny(), each, frontier=Pipeline(), policy=BlockCausal()).num_passes < 12


def test_the_depth_bounds_the_blocks_in_flight() -> None:
    """With a share of 0 a block is added in every step, until as many as the depth allows are in flight."""
    most = {}
    for depth in (1, 2, 3):
        each = request(7, 18, 3, rule={"threshold": 1.0}, strict=True, tau_add=0.0, tau_act=1.0, depth=depth)
        passes = watched_run(tiny(), [each], frontier=Pipeline(), policy=BlockCausal())
        flying = [((p.block_state_SK == OPEN) | (p.block_state_SK == FULL)).sum(1).amax() for p in passes]
        most[depth] = int(max(flying))
    assert most == {1: 1, 2: 2, 3: 3}


# --- nested drafts


@drawn
@given(st.integers(0, 12), st.integers(5, 16), st.integers(4, 9), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_nested_drafts_give_the_answer_of_one_token_a_pass(
    prompt: int, length: int, block: int, num_drafts: int, seed: int, fixed: bool
) -> None:
    """Same tokens with the same cache, in no more passes, with any number of drafts and a shorter last block."""
    each = one_a_pass(prompt, length, block, seed)
    slow = alone(tiny(), each, policy=Dual())
    step = make_step(tiny(), [each], policy=Dual(), drafter=Nested(num_drafts, block), fixed=fixed)
    told = trace(step)
    fast = result(step, 0, each)
    assert fast.token_ids == slow.token_ids
    assert slow.num_passes == length
    num_accepted = sum(int(column(readback, "num_accepted")) for readback in told)
    assert length - num_accepted <= fast.num_passes == len(told) <= length


def test_nested_drafts_save_passes_and_wrong_ones_are_refused() -> None:
    """Control of the equality above: drafts are accepted; and tampered drafts are not, at no change of the answer."""
    each = one_a_pass(7, 24, 8)
    slow, fast = (
        alone(tiny(), each, policy=Dual(), **({"drafter": Nested(3, 8)} if drafts else {})) for drafts in (False, True)
    )
    assert fast.num_passes < slow.num_passes - 3
    step = make_step(tiny(), [each], policy=Dual(), drafter=Nested(3, 8))
    with torch.inference_mode():
        while step.canvas.active_S.any():
            step()
            token_SZ = step.canvas.pending_token_SZ
            token_SZ.copy_(torch.where(token_SZ >= 0, (token_SZ + 1) % 300, -1))
    assert result(step, 0, each) == slow


def test_nested_drafts_stop_at_an_end_of_text_as_one_token_a_pass_does() -> None:
    """An end of text among the drafts ends the later views of the same pass, too."""
    model = tiny()
    for seed in range(15):
        plain = alone(model, one_a_pass(6, 16, 16, seed), policy=Dual())
        each = one_a_pass(6, 16, 16, seed, eos=(plain.token_ids[8 + seed % 8],))
        slow = alone(model, each, policy=Dual())
        fast = alone(model, each, policy=Dual(), drafter=Nested(3, 16))
        assert fast.token_ids == slow.token_ids, seed


def test_more_drafts_than_a_block_holds_are_refused() -> None:
    """An error at once, not a crash inside."""
    with pytest.raises(ConfigError, match="do not fit"):
        make_step(tiny(), [one_a_pass(1, 2, 2)], policy=Dual(), drafter=Nested(4, 2))


@pytest.mark.parametrize("drafter", [TwoPass(), Nested(2, 2)])
def test_a_drafter_without_scratch_entries_is_refused(drafter: Drafter) -> None:
    """A pool with an entry less than the drafter's rows need."""
    step = make_step(tiny(), [one_a_pass(1, 2, 2)], drafter=drafter)

    def over(num_scratch: int) -> Step:
        pool = make_pool(tiny(), 1, 3, num_scratch)
        return Step(tiny(), step.canvas, step.params, pool, frontier=Blocks(), policy=Dual(), drafter=drafter)

    with pytest.raises(ConfigError, match=f"needs {drafter.num_scratch} scratch entries"):
        over(drafter.num_scratch - 1)
    over(drafter.num_scratch)()  # control: with that one it runs


@both_forms
@pytest.mark.parametrize(
    "drafter",
    [
        TwoPass(num_rows=9, num_search=3),
        TwoPass(num_rows=4, num_search=8),
        TwoPass(num_rows=1, num_search=1),
        TwoPass(),
        Nested(2, 8),
    ],
    ids=["as-long", "search", "one", "far-longer", "nested"],
)
def test_a_drafters_lists_may_fill_the_canvas(drafter: Drafter, fixed: bool) -> None:
    """Lists as long as the canvas or longer, more searched positions than rows to pay for them, and a block width
    beyond the canvas are in order: fewer entries are used."""
    each = changed_to(one_a_pass(1, 2, 2), gamma=2.0)
    plain = alone(tiny(), each, policy=Dual(), fixed=fixed)
    assert alone(tiny(), each, policy=Dual(), drafter=drafter, fixed=fixed).token_ids == plain.token_ids


@both_forms
def test_fewer_scored_candidates_than_searched_positions(fixed: bool) -> None:
    """A budget below the search: what is scored is searched."""
    each = request(5, 6, 6)
    step = make_step(tiny(), [each], drafter=TwoPass(num_rows=20, num_search=8), fixed=fixed)
    step.budgets = Budgets(step.canvas.capacity, 6) if fixed else None
    passes = watch(step)
    got = run(step, [each])
    most = max(sum(row >= 0 for row in p.scratch_rows(0, 18, 8)) for p in verify_passes(passes))
    assert 0 < most <= 5
    assert got == [alone(tiny(), each, drafter=TwoPass(num_rows=20, num_search=5))]


# --- tracking


def windowed_run(cases: Sequence[Case], verified: bool, **options: Any) -> list[Result]:
    drafter = TwoPass(num_rows=32, num_search=4) if verified else Drafter()  # room for all as context
    return run(make_step(tiny(), cases, frontier=Window(), drafter=drafter, **options), cases)


WINDOWED = [changed_to(each, window=5) for each in verifying([*TWO_SEATS, *ENDING])]


@both_forms
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "verified"])
def test_tracking_everything_is_the_uncached_run(drafter: bool, fixed: bool) -> None:
    """Windows and budgets as large as the canvas; or a refresh in every pass. (Context is taken by mass: without room
    for all of it, a verified run depends on who tracks.)"""
    plain = windowed_run(WINDOWED, drafter, fixed=fixed)
    assert windowed_run(WINDOWED, drafter, policy=Tracked(), fixed=fixed) == plain
    refreshed = [changed_to(each, refresh=1, track=0, interval=1) for each in WINDOWED]
    assert windowed_run(refreshed, drafter, policy=Tracked(), fixed=fixed) == plain


def test_tracking_little_is_not_the_uncached_run() -> None:
    """Negative control."""
    little = [changed_to(each, refresh=1, track=0) for each in WINDOWED]
    assert windowed_run(little, False, policy=Tracked()) != windowed_run(WINDOWED, False)


def tracked_by_loop(each: Pass, seat: int, window: int, refresh: int, track: int) -> set[int]:
    """The definition: the candidates, the leftmost undecided positions, all that was committed last, and in what the
    budget has left the heaviest of the other decided ones."""
    end, final_N = int(each.end_S[seat]), each.final_SN[seat]
    undecided = [pos for pos in range(end) if not final_N[pos]]
    now = int(each.pass_S[seat])
    if now == 0:
        return set(range(end))
    new = {pos for pos in range(end) if int(each.commit_pass_SN[seat, pos]) == now}
    older = [pos for pos in range(end) if final_N[pos] and pos not in new]
    older.sort(key=lambda pos: -float(each.mass_SN[seat, pos]))
    return {*undecided[: max(window, refresh)], *new, *older[: max(track - len(new), 0)]}


@both_forms
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "verified"])
@pytest.mark.parametrize(
    "mass", [MassSpec(), MassSpec(1, 2), MassSpec(0, softmax=True)], ids=["raw", "layers", "softmax"]
)
def test_a_pass_recomputes_the_windows_and_the_heaviest(mass: MassSpec, drafter: bool, fixed: bool) -> None:
    sizes = ((4, 6, 3), (5, 2, 0), (3, 3, 8), (NO_LIMIT, 1, 4))
    cases = [
        changed_to(e, window=w, refresh=r, track=t) for e, (w, r, t) in zip(verifying([*TWO_SEATS, *ENDING]), sizes)
    ]
    members = {"frontier": Window(), "policy": Tracked(mass)} | ({"drafter": two_pass()} if drafter else {})
    passes = [each for each in watched_run(tiny(), cases, **members, fixed=fixed) if not each.verifies]
    chosen = 0
    for each in passes:
        for seat, size in enumerate(sizes):
            rows = set(each.canvas_rows(seat))
            if rows:
                assert rows == tracked_by_loop(each, seat, *size)
                decided = {pos for pos in range(int(each.end_S[seat])) if each.final_SN[seat, pos]}
                chosen += bool(decided & rows) and bool(decided - rows)
    assert chosen > 10


def test_a_pass_that_forgets_new_tokens_is_noticed() -> None:
    """Negative control: it recomputes other positions than the definition."""
    passes = watched_run(tiny(), TRACKED, frontier=Window(), policy=Forgetting())
    assert any(set(each.canvas_rows(0)) not in (set(), tracked_by_loop(each, 0, 4, 6, 3)) for each in passes)


MOST_ROWS = {name: KINDS[name] for name in ("prefix", "dual", "tracked", "pipeline", "flash", "dream-tracked")}


def most_rows(kind: Kind, each: Case) -> int:
    members: dict[str, Any] = {"frontier": Blocks()} | kind.members()
    reach = members["frontier"].reach(each.length, each.block_length, each.params)
    most: int = members["policy"].most_rows(len(each.prompt), each.length, reach, each.params)
    return most


@pytest.mark.parametrize("kind", MOST_ROWS)
def test_ordinary_passes_stay_within_their_most_rows(kind: str) -> None:
    """What a seat asks for when it joins covers every pass that is no refresh; and a refresh needs all."""
    limits: Sequence[dict[str, int]] = (
        {},
        {"window": 2, "refresh": 1, "track": 1, "depth": 1},
        {"refresh": 3, "track": 9, "depth": 2},
    )
    cases = [changed_to(each, **more) for more in limits for each in MOST_ROWS[kind].cases]
    most = [most_rows(MOST_ROWS[kind], each) for each in cases]
    step = MOST_ROWS[kind].step(cases)
    seen, exceeded = set(), False
    with torch.inference_mode():
        while step.canvas.active_S.any():
            look = step.look()
            for seat in range(len(cases)):
                num_rows = int(look.run_SN[seat].sum())
                if look.due_S[seat]:
                    exceeded |= num_rows > most[seat]
                else:
                    assert num_rows <= most[seat]
                    seen.add(seat)
            step.run(look)
    assert exceeded or kind == "pipeline"  # the control: a refresh is more
    assert seen == set(range(len(cases)))
