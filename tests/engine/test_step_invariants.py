"""What the fixed-shape step promises whatever the numbers: who sees what, what is written, and that no request, no
host and no replay changes anything. Every promise comes with a control that breaks it.

L layers, S seats, E entries, N canvas positions, Q rows of a pass, T context rows, K searched positions
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.fixed import (
    BlockCausal,
    Blocks,
    Case,
    Dual,
    Nested,
    Pipeline,
    Result,
    TwoPass,
    Whole,
    case,
    make_step,
    place,
    result,
    run,
)
from models.checkpoints import random_model
from unmask.config import SamplingParams
from unmask.core import layout
from unmask.core.canvas import FULL, OPEN, SEALED, Canvas
from unmask.core.rows import FixedPlan
from unmask.decoding.frontier import FrontierView, Window
from unmask.decoding.params import DecodeParams
from unmask.engine.step import READBACK, Budgets, FixedStep
from unmask.errors import ConfigError
from unmask.models.attention import AttentionWeights, DenseContext
from unmask.models.loading import load_model
from unmask.models.transformer import Transformer

MODELS = ("tiny-llada", "tiny-llada-gqa")
COMMON_TOKENS = (54, 114, 93, 272)
"""Tokens that the tiny models like to predict: as ends of text they do occur."""

drawn = settings(max_examples=20, deadline=None, derandomize=True)


@cache
def tiny(name: str = "tiny-llada", dtype: str = "float64") -> Transformer:
    """A golden model. fp64, so that equal decisions do not hang on the shape of a matrix product."""
    return load_model(Path(__file__).parents[1] / "data" / "golden" / "models" / name, dtype=dtype)


@cache
def one_layer() -> Transformer:
    return random_model(n_layers=1).double()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(100 * length + seed).randrange(300) for _ in range(length)]


def request(
    prompt: int, length: int, block: int, seed: int = 0, eos: tuple[int, ...] = (), rule: Any = None, **more: Any
) -> Case:
    """A request; ``rule`` is what a user says of steps, threshold and sampling, ``more`` are the rule's own fields."""
    said = SamplingParams(max_tokens=length, block_length=block, **(rule or {"threshold": 0.9}))
    return case(prompt_of(prompt, seed), said, eos, **more)


def one_a_pass(prompt: int, length: int, block: int, seed: int = 0, eos: tuple[int, ...] = ()) -> Case:
    """The most probable candidate of each pass, and no other."""
    return request(prompt, length, block, seed, eos, {"steps": length}, quota=(1,) * length)


def alone(model: Transformer, each: Case, **options: Any) -> Result:
    return run(make_step(model, [each], **options), [each])[0]


def column(readback: Tensor, name: str) -> Tensor:
    return readback[:, READBACK.index(name)]


@torch.inference_mode()
def trace(step: FixedStep, limit: int = 200) -> list[Tensor]:
    """Run to the end; the readback of every step."""
    told = []
    while bool(step.canvas.active_S.any()):
        step()
        told.append(step.readback.clone())
        assert len(told) < limit
    return told


def canvas_state(canvas: Canvas, seat: int) -> dict[str, Tensor]:
    """All that the canvas holds of a seat."""
    return {name: value[seat].clone() for name, value in vars(canvas).items() if isinstance(value, Tensor)}


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


# --- what a pass did, recorded from outside


@dataclass(frozen=True)
class Pass:
    """One forward of a step: its plan, the canvas at that time, and K/V around it."""

    plan: FixedPlan
    token_SN: Tensor
    end_S: Tensor
    block_SN: Tensor
    block_state_SK: Tensor
    pending_pos_SZ: Tensor
    pending_token_SZ: Tensor
    held_token_SE: Tensor
    """Token of the row that last wrote an entry, -1 none; with this pass's writes."""
    held_pos_SE: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    hidden_SQD: Tensor
    pipelined: bool

    def rows(self) -> Iterator[tuple[int, int]]:
        """Seat and row of everything that is not padding."""
        yield from map(tuple, self.plan.valid_SQ.nonzero().tolist())

    def seen(self, seat: int, row: int) -> list[tuple[int, int]]:
        """(position, token) of every entry that a row meets: its sweep and its part of the live list."""
        plan = self.plan
        shadow = plan.shadow_SN[seat].tolist()
        entries = [entry for entry in range(int(plan.see_SQ[seat, row])) if not shadow[entry]]
        live = zip(plan.live_SJ[seat].tolist(), plan.live_bits_SQJ[seat, row].tolist())
        entries += [entry for entry, bit in live if bit]
        return [(int(self.held_pos_SE[seat, entry]), int(self.held_token_SE[seat, entry])) for entry in entries]

    def content(self, seat: int, row: int) -> dict[int, int]:
        """Token at each position as a row sees it; the row must see the positions up to its reach once each."""
        seen = self.seen(seat, row)
        reach = self.reach(seat, row)
        assert sorted(pos for pos, _ in seen) == list(range(reach)), f"seat {seat}, row {row}"
        return dict(seen)

    def reach(self, seat: int, row: int) -> int:
        """Everything that exists or, where blocks are in flight, everything up to the end of the row's block."""
        end = int(self.end_S[seat])
        if not self.pipelined:
            return end
        block_N = self.block_SN[seat, :end]
        own = block_N[int(self.plan.pos_SQ[seat, row])]
        return int((block_N <= own).sum())


def watch(step: FixedStep) -> list[Pass]:
    """Records every pass that the step makes from now on."""
    passes: list[Pass] = []
    forward, canvas, cache_ = step._forward, step.canvas, step.cache
    held_token_SE = torch.full(cache_.k.shape[1:3], -1)
    held_pos_SE = torch.full(cache_.k.shape[1:3], -1)

    def recorded(plan: FixedPlan) -> Tensor:
        for held_SE, value_SQ in ((held_token_SE, plan.token_SQ), (held_pos_SE, plan.pos_SQ)):
            held_SE.scatter_(1, plan.write_SQ, value_SQ.long())
        before = cache_.k.clone(), cache_.v.clone()
        names = ("token_SN", "end_S", "block_SN", "block_state_SK", "pending_pos_SZ", "pending_token_SZ")
        at_that_time = {name: getattr(canvas, name).clone() for name in names}
        hidden_SQD = forward(plan)
        passes.append(
            Pass(
                plan=plan,
                **at_that_time,
                held_token_SE=held_token_SE.clone(),
                held_pos_SE=held_pos_SE.clone(),
                before=before,
                after=(cache_.k.clone(), cache_.v.clone()),
                hidden_SQD=hidden_SQD.clone(),
                pipelined=isinstance(step.frontier, Pipeline),
            )
        )
        return hidden_SQD

    step._forward = recorded  # type: ignore[method-assign]
    return passes


def watched_run(model: Transformer, cases: Sequence[Case], **options: Any) -> list[Pass]:
    """The passes of a whole run, with one empty seat."""
    step = make_step(model, cases, seats=len(cases) + 1, **options)
    passes = watch(step)
    run(step, cases)
    return passes


# --- each row sees each visible position exactly once


TWO_SEATS = (request(5, 12, 6), request(9, 9, 4, seed=1))
ENDING = [replace(each, params=replace(each.params, eos=COMMON_TOKENS)) for each in TWO_SEATS]
ONE_A_PASS = (one_a_pass(5, 12, 6), one_a_pass(9, 9, 4, seed=1))
PIPELINED = (request(5, 12, 4, tau_add=0.1, tau_act=0.5), request(9, 10, 3, seed=1, tau_add=0.5))


@pytest.mark.parametrize("frontier", [Blocks, Whole])
def test_canvas_rows_see_the_canvas_as_it_is(frontier: type[Blocks] | type[Whole]) -> None:
    """With full recompute, every row meets every position once, holding what the canvas holds; until its end."""
    passes = watched_run(tiny(), [*TWO_SEATS, *ENDING], frontier=frontier())
    assert any((each.end_S[2:4] < passes[0].end_S[2:4]).any() for each in passes)
    for each in passes:
        for seat, row in each.rows():
            content = each.content(seat, row)
            assert content == dict(enumerate(each.token_SN[seat, : each.end_S[seat]].tolist()))


def test_rows_of_the_pipeline_see_up_to_their_block_and_sealed_blocks_as_they_ended() -> None:
    """Block-causal: nothing after the own block; what is not recomputed any more was written with its final tokens."""
    reaches = set()
    for each in watched_run(tiny(), PIPELINED, frontier=Pipeline(), policy=BlockCausal()):
        for seat, row in each.rows():
            content = each.content(seat, row)
            assert list(content.values()) == each.token_SN[seat, : len(content)].tolist()
            reaches.add(len(content))
    assert len(reaches) > 4


def nested_passes(num_drafts: int = 3) -> list[Pass]:
    return watched_run(tiny(), ONE_A_PASS, policy=Dual(), drafter=Nested(num_drafts, block_width=6))


def nested_content(each: Pass, seat: int, row: int, num_drafts: int = 3, width: int = 6) -> None:
    """A row of view z sees the first z drafts in its block, MASK or final tokens elsewhere in it."""
    first = each.plan.pos_SQ.shape[1] - num_drafts * width
    view = 0 if row < first else 1 + (row - first) // width
    content = each.content(seat, row)
    undecided = (each.token_SN[seat] == 319).nonzero().flatten()
    current = each.block_SN[seat] == each.block_SN[seat, undecided[0]]
    expected = each.token_SN[seat].clone().long()
    for z in range(view):
        assert each.pending_pos_SZ[seat, z] >= 0
        expected[each.pending_pos_SZ[seat, z]] = each.pending_token_SZ[seat, z]
    for pos in current.nonzero().flatten().tolist():
        assert content[pos] == expected[pos]


def test_rows_of_nested_views_see_their_own_view_only() -> None:
    """Each view is the canvas with one draft more, each position once; canvas rows never see a draft."""
    views = 0
    for each in nested_passes():
        for seat, row in each.rows():
            nested_content(each, seat, row)
        views += int(each.plan.valid_SQ[:, -18:].any())
    assert views > 2


NUM_CONTEXT, NUM_SEARCH = 6, 4


def two_pass(strict: bool) -> TwoPass:
    return TwoPass(num_context=NUM_CONTEXT, num_search=NUM_SEARCH, strict=strict)


def verify_passes(passes: Sequence[Pass]) -> list[Pass]:
    return [each for each in passes if each.plan.pos_SQ.shape[1] == NUM_CONTEXT + 2 * NUM_SEARCH]


def verify_content(each: Pass, seat: int, row: int, mask: int = 319) -> str:
    """The isolation table: what each kind of row sees at the searched positions, in their order."""
    content = each.content(seat, row)
    kind, i = ("context", 0) if row < NUM_CONTEXT else ("draft" if row < NUM_CONTEXT + NUM_SEARCH else "mask", row)
    i = (i - NUM_CONTEXT) % NUM_SEARCH
    search = range(NUM_CONTEXT, NUM_CONTEXT + NUM_SEARCH)
    for j, at in enumerate(search):
        if not each.plan.valid_SQ[seat, at]:
            continue
        drafted = {"context": False, "draft": j <= i, "mask": j < i}[kind]
        pos = int(each.plan.pos_SQ[seat, at])
        assert content[pos] == (int(each.plan.token_SQ[seat, at]) if drafted else mask), (kind, i, j)
    for at in range(NUM_CONTEXT):
        if each.plan.valid_SQ[seat, at]:
            pos = int(each.plan.pos_SQ[seat, at])
            assert content[pos] == each.token_SN[seat, pos] != mask
    return kind


@pytest.mark.parametrize("strict", [True, False])
def test_rows_of_the_second_pass_see_drafts_before_them_and_masks_after(strict: bool) -> None:
    """Context rows see every searched position as MASK; draft i the drafts up to i; MASK i the drafts before i."""
    passes = verify_passes(watched_run(tiny(), [*TWO_SEATS, *ENDING], drafter=two_pass(strict)))
    kinds = [verify_content(each, seat, row) for each in passes for seat, row in each.rows()]
    assert {kind: kinds.count(kind) > 10 for kind in ("context", "draft", "mask")} == dict.fromkeys(
        ("context", "draft", "mask"), True
    )


def test_context_rows_are_the_latest_commits() -> None:
    """What a step's first pass has just committed is live in its second: on the canvas its K/V are those of MASK."""
    cases = [request(5, 16, 16, seed, rule={"threshold": 0.97}) for seed in range(3)]
    step = make_step(tiny(), cases, drafter=two_pass(True))
    passes = watch(step)
    run(step, cases)
    for first, second in zip(passes[::2], passes[1::2]):
        for seat in range(len(cases)):
            new = (first.token_SN[seat] != second.token_SN[seat]).nonzero().flatten().tolist()
            context = second.plan.pos_SQ[seat, :NUM_CONTEXT][second.plan.valid_SQ[seat, :NUM_CONTEXT]].tolist()
            assert not context or set(new[-NUM_CONTEXT:]) == set(context[: len(new)])


def test_nothing_past_a_new_end_is_searched() -> None:
    """An end of text that the first pass commits cuts the second: no row stands, and none looks, behind it."""
    plain = [request(5, 16, 16, seed, rule={"threshold": 0.97}) for seed in range(6)]
    answers = [alone(tiny(), each) for each in plain]
    cases = [
        replace(each, params=replace(each.params, eos=(answer.token_ids[answer.commit_pass.index(1)],)))
        for each, answer in zip(plain, answers)
    ]
    first, second = watched_run(tiny(), cases, drafter=two_pass(True))[:2]
    assert (second.end_S < first.end_S).sum() >= 5
    for seat, row in second.rows():
        assert second.plan.pos_SQ[seat, row] < second.end_S[seat]
        verify_content(second, seat, row)


def test_a_position_is_seen_twice_without_the_shadow() -> None:
    """Negative control: the same plans without their shadow let rows meet positions twice."""
    nested = [each for each in nested_passes() if each.plan.shadow_SN.any()]
    verify = verify_passes(watched_run(tiny(), TWO_SEATS, drafter=two_pass(True)))
    for each in (nested[0], verify[0]):
        bare = replace(each, plan=replace(each.plan, shadow_SN=torch.zeros_like(each.plan.shadow_SN)))
        with pytest.raises(AssertionError, match="seat"):
            [bare.content(seat, row) for seat, row in bare.rows()]


def test_the_isolation_table_tells_a_draft_from_a_mask() -> None:
    """Negative control: with drafts and MASK rows exchanged the content is not that of the table."""
    each = verify_passes(watched_run(tiny(), TWO_SEATS, drafter=two_pass(True)))[0]
    token_SE = each.held_token_SE.clone()
    first, size = each.token_SN.shape[1] + NUM_CONTEXT, NUM_SEARCH
    token_SE[:, first : first + 2 * size] = token_SE[:, first : first + 2 * size].roll(size, 1)
    wrong = replace(each, held_token_SE=token_SE)
    with pytest.raises(AssertionError):
        [verify_content(wrong, seat, row) for seat, row in wrong.rows()]


# --- isolation of the second pass


def first_verification(model: Transformer, strict: bool, steps: int = 2) -> tuple[FixedStep, Pass]:
    """The second pass of an early step, all its searched positions in use."""
    step = make_step(model, [request(5, 14, 14, rule={"threshold": 0.97})], drafter=two_pass(strict))
    passes = watch(step)
    with torch.inference_mode():
        for _ in range(steps):
            step()
    each = passes[-1]
    assert each.plan.valid_SQ[:, NUM_CONTEXT:].all()
    return step, each


@torch.inference_mode()
def mask_rows(step: FixedStep, each: Pass, changed_draft: int | None = None) -> Tensor:
    """Hidden rows [K, D] of the MASK rows when the pass is made again, with another token in one draft."""
    step.cache.k.copy_(each.before[0])
    step.cache.v.copy_(each.before[1])
    token_SQ = each.plan.token_SQ.clone()
    if changed_draft is not None:
        token_SQ[:, NUM_CONTEXT + changed_draft] = (token_SQ[:, NUM_CONTEXT + changed_draft] + 7) % 300
    return step._forward(replace(each.plan, token_SQ=token_SQ))[0, NUM_CONTEXT + NUM_SEARCH :].clone()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_strict_isolation_hides_a_draft_from_all_rows_up_to_its_own(name: str, dtype: str) -> None:
    """Another token in draft k leaves the MASK rows 0..k bit-equal, and reaches every later one."""
    step, each = first_verification(tiny(name, dtype), strict=True)
    before = mask_rows(step, each)
    for k in range(NUM_SEARCH):
        after = mask_rows(step, each, changed_draft=k)
        assert torch.equal(after[: k + 1], before[: k + 1]), k
        assert (after[k + 1 :] != before[k + 1 :]).any(-1).all()


def test_the_references_isolation_leaks_from_the_second_layer_on() -> None:
    """Negative control: live MASK rows of later positions carry draft k back to its own row, except for the last k."""
    step, each = first_verification(tiny(), strict=False)
    before = mask_rows(step, each)
    for k in range(NUM_SEARCH):
        own = mask_rows(step, each, changed_draft=k)[k]
        assert torch.equal(own, before[k]) == (k == NUM_SEARCH - 1), k


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
    for i in range(NUM_SEARCH):
        pos = int(each.plan.pos_SQ[0, NUM_CONTEXT + i])
        assert token_N[pos] == model.config.mask_token_id
        rows.append(model(token_N[None], DenseContext(torch.arange(end), rope=model.rope))[0, pos])
        token_N = token_N.clone()
        token_N[pos] = each.plan.token_SQ[0, NUM_CONTEXT + i]
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


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gamma_above_one_is_no_verification(name: str, strict: bool) -> None:
    """The second pass alone changes nothing: same tokens, same passes, same pass of every commit."""
    cases = [request(prompt, 16, 8, eos=eos, gamma=2.0) for prompt in (1, 7, 20) for eos in ((), COMMON_TOKENS)]
    plain = run(make_step(tiny(name), cases), cases)
    step = make_step(tiny(name), cases, drafter=two_pass(strict))
    told = trace(step)
    assert [result(step, seat, each) for seat, each in enumerate(cases)] == plain
    assert not any(column(each, "num_accepted").any() for each in told)


def test_a_small_gamma_accepts_drafts_and_saves_steps() -> None:
    """Control of the equality above: below one, drafts are accepted, told, and the run is shorter."""
    each = request(7, 24, 12, gamma=0.2)
    slow = alone(tiny(), each)
    step = make_step(tiny(), [each], drafter=two_pass(True))
    told = trace(step)
    assert sum(int(column(readback, "num_accepted")) for readback in told) > 5
    assert len(told) < slow.num_passes - 5
    assert len(told) == result(step, 0, each).num_passes


# --- what a pass writes


CARRYING = [
    request(5, 12, 12, seed, rule={"steps": 4, "threshold": 0.95, "alg": "confidence_threshold_budget"})
    for seed in range(2)
]
KINDS: dict[str, tuple[Sequence[Case], Callable[[], dict[str, Any]]]] = {
    "recompute": (TWO_SEATS, dict),
    "carry": (CARRYING, dict),
    "dual": (ONE_A_PASS, lambda: {"policy": Dual()}),
    "pipeline": (PIPELINED, lambda: {"frontier": Pipeline(), "policy": BlockCausal()}),
    "nested": (ONE_A_PASS, lambda: {"policy": Dual(), "drafter": Nested(3, 6)}),
    "two-pass": (TWO_SEATS, lambda: {"drafter": two_pass(True)}),
    "two-pass-reference": (TWO_SEATS, lambda: {"drafter": two_pass(False)}),
    "two-pass-dual": (TWO_SEATS, lambda: {"policy": Dual(), "drafter": two_pass(True)}),
}
"""Requests, and a fresh set of the axes' members, of every kind of step."""


def assert_writes(each: Pass, num_canvas: int) -> None:
    """Canvas entries that no row of this pass claims are bit-identical after it."""
    claimed_SE = torch.zeros(each.before[0].shape[1:3], dtype=torch.bool)
    claimed_SE.scatter_(1, each.plan.write_SQ, each.plan.valid_SQ)
    untouched_SN = ~claimed_SE[:, :num_canvas]
    for before, after in zip(each.before, each.after):
        assert torch.equal(before[:, :, :num_canvas][:, untouched_SN], after[:, :, :num_canvas][:, untouched_SN])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_writes_the_canvas_entries_of_its_canvas_rows_only(kind: str) -> None:
    """A row that writes a canvas entry stands at that position with the canvas's own token; drafts write scratch."""
    cases, options = KINDS[kind]
    step = make_step(tiny(), cases, seats=3, **options())
    passes = watch(step)
    run(step, cases)
    num_canvas = step.cache.num_canvas
    for each in passes:
        assert_writes(each, num_canvas)
        plan = each.plan
        on_canvas_SQ = plan.write_SQ < num_canvas
        assert not (on_canvas_SQ & ~plan.valid_SQ).any()
        assert torch.equal(plan.write_SQ[on_canvas_SQ], plan.pos_SQ[on_canvas_SQ])
        assert torch.equal(each.token_SN.gather(1, plan.pos_SQ)[on_canvas_SQ], plan.token_SQ[on_canvas_SQ].int())


@pytest.mark.parametrize("strict", [True, False])
def test_the_second_pass_leaves_the_canvas_entries_alone(strict: bool) -> None:
    """K/V of all canvas entries, bit for bit, before and after every verification."""
    step = make_step(tiny(), TWO_SEATS, drafter=two_pass(strict))
    passes, num_canvas = watch(step), step.cache.num_canvas
    run(step, TWO_SEATS)
    for each in verify_passes(passes):
        for before, after in zip(each.before, each.after):
            assert torch.equal(before[:, :, :num_canvas], after[:, :, :num_canvas])
            assert not torch.equal(before, after) or not each.plan.valid_SQ.any()


def test_a_draft_written_to_the_canvas_is_noticed() -> None:
    """Negative control: a verification row that wrote its canvas entry would change it."""
    step, each = first_verification(tiny(), strict=True)
    row = NUM_CONTEXT
    write_SQ = each.plan.write_SQ.clone()
    write_SQ[0, row] = each.plan.pos_SQ[0, row]
    with torch.inference_mode():
        step._forward(replace(each.plan, write_SQ=write_SQ))
    wrong = replace(each, after=(step.cache.k.clone(), step.cache.v.clone()))
    with pytest.raises(AssertionError):
        assert_writes(wrong, step.cache.num_canvas)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_reads_what_nobody_wrote(kind: str) -> None:
    """Absurd numbers in fresh entries and, between steps, in scratch: the run does not notice; and the entries of
    no request keep them. (Finite ones: under a mask, kernels multiply values by 0.)"""
    cases, options = KINDS[kind]
    plain = run(make_step(tiny(), cases, seats=3, **options()), cases)
    step = make_step(tiny(), cases, seats=3, **options())
    num_canvas = step.cache.num_canvas
    for kv in (step.cache.k, step.cache.v):
        kv.fill_(1e4)
    with torch.inference_mode():
        while step.canvas.active_S.any():
            step()
            for kv in (step.cache.k, step.cache.v):
                kv[:, :, num_canvas:] = 1e4
    assert [result(step, seat, each) for seat, each in enumerate(cases)] == plain
    for kv in (step.cache.k, step.cache.v):
        assert (kv[:, 2, :num_canvas] == 1e4).all()
        for seat, each in enumerate(cases):
            assert (kv[:, seat, each.size : num_canvas] == 1e4).all()


def test_absurd_numbers_in_entries_that_are_read_are_noticed() -> None:
    """Negative control: the same numbers in the prompt's entries of a cached run change its answer."""
    cases, options = KINDS["dual"]
    plain = run(make_step(tiny(), cases, **options()), cases)
    step = make_step(tiny(), cases, **options())
    with torch.inference_mode():
        step()
        step.cache.v[:, :, :4] = 1e4
    assert run(step, cases) != plain


# --- alone or in a batch


def seated(model: Transformer, places: Mapping[int, Case], seats: int, guests: Sequence[Case], **options: Any) -> Any:
    """A step with requests in chosen seats, wide enough for the guests that join later."""
    everyone = [*places.values(), *guests]
    widest = Case(
        prompt=[0],
        length=max(each.size for each in everyone),
        block_length=min(each.block_length for each in everyone),
        params=replace(everyone[0].params, quota=(1,) * max(len(each.params.quota) for each in everyone)),
    )
    step = make_step(model, [widest], seats=seats, **options)
    step.canvas.release(0)
    step.params.release(0)
    for seat, each in places.items():
        place(step, seat, each)
    return step


@torch.inference_mode()
def run_with_guests(step: FixedStep, places: Mapping[int, Case], guests: Sequence[Case]) -> list[tuple[Case, Result]]:
    """Run to the end; every second step a guest takes a seat that has become free. All answers, with their requests."""
    waiting, inside, done = list(guests), dict(places), []
    for number in range(300):
        step()
        assert not column(step.readback, "overflow").any()
        for seat in [seat for seat in inside if not step.canvas.active_S[seat]]:
            each = inside.pop(seat)
            done.append((each, result(step, seat, each)))
            step.canvas.release(seat)
        free = [seat for seat in places if seat not in inside]
        if number % 2 and waiting and free:
            inside[free[0]] = waiting.pop(0)
            place(step, free[0], inside[free[0]])
        if not inside and not waiting:
            return done
    raise AssertionError("unfinished")


def assert_alone(model: Transformer, done: Sequence[tuple[Case, Result]], options: Callable[[], Any]) -> None:
    for each, got in done:
        assert got == alone(model, each, **options()), each


MIXED_RULES: Sequence[dict[str, Any]] = (
    {"steps": 6},
    {"threshold": 0.8},
    {"factor": 1.0},
    {"entropy_bound": 1.0},
    {"steps": 8, "temperature": 0.9, "seed": 5},
    {"threshold": 0.7, "temperature": 0.7, "top_p": 0.9, "seed": 6},
    {"steps": 5, "remasking": "random", "seed": 7},
    {"steps": 7, "alg": "topk_margin", "alg_temp": 0.5, "seed": 8},
    {"threshold": 0.8, "suppress_token_ids": (54, 114)},
)


def mixed(sizes: Sequence[tuple[int, int, int]] = ((1, 8, 4), (7, 12, 5), (20, 6, 6))) -> list[Case]:
    """One request of every rule, of different prompt, answer and block lengths; some end early."""
    return [
        request(*sizes[i % len(sizes)], seed=i, eos=COMMON_TOKENS[i % 3 : 2], rule=rule)
        for i, rule in enumerate(MIXED_RULES)
    ]


GUEST_KINDS: dict[str, tuple[Callable[[], list[Case]], Callable[[], dict[str, Any]]]] = {
    "recompute": (mixed, dict),
    "two-pass": (
        lambda: [
            replace(each, params=replace(each.params, gamma=(2.0, 0.2, 0.6)[i % 3])) for i, each in enumerate(mixed())
        ],
        lambda: {"drafter": two_pass(True)},
    ),
    "pipeline": (
        lambda: [
            request(prompt, 12 - i % 3, block, i, tau_add=add, tau_act=act, rule={"threshold": 0.8})
            for i, (prompt, block, add, act) in enumerate(
                [(1, 4, 0.1, 0.95), (7, 3, 0.5, 0.5), (20, 5, 1.0, 1.0), (1, 2, 0.0, 0.9), (7, 6, 0.3, 0.3)] * 2
            )
        ],
        lambda: {"frontier": Pipeline(), "policy": BlockCausal()},
    ),
    "nested": (
        # One size, so that no entry of an earlier request lies behind a later one's canvas.
        lambda: [one_a_pass(7, 12, block, seed) for seed, block in enumerate((4, 5, 6, 3, 12, 6, 4))],
        lambda: {"policy": Dual(), "drafter": Nested(3, 12)},
    ),
}


@pytest.mark.parametrize("kind", GUEST_KINDS)
def test_a_request_does_not_feel_its_neighbours(kind: str) -> None:
    """Eight seats, two of them empty, mixed rules; requests that join later into freed seats, in other phases. Each
    has the tokens, the passes and the commits that it has alone."""
    cases, options = GUEST_KINDS[kind]
    first, guests = cases()[:6], cases()[6:]
    places = dict(zip((0, 1, 3, 4, 6, 7), first))
    step = seated(tiny(), places, 8, guests, **options())
    done = run_with_guests(step, places, guests)
    assert len(done) == len(first) + len(guests)
    assert_alone(tiny(), done, options)


def test_all_rules_in_one_batch_of_gqa() -> None:
    """The same for shared key heads, every rule at once."""
    cases = mixed()
    assert_alone(tiny(MODELS[1]), list(zip(cases, run(make_step(tiny(MODELS[1]), cases, seats=11), cases))), dict)


def test_a_neighbours_row_is_noticed() -> None:
    """Negative control: a step that reads the next seat's K/V gives other answers than the request alone."""
    cases = mixed()[:3]
    step = make_step(tiny(), cases)
    forward = step._forward

    def swapped(plan: FixedPlan) -> Tensor:
        return forward(plan).roll(1, 0)

    step._forward = swapped  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        assert_alone(tiny(), list(zip(cases, run(step, cases))), dict)


@pytest.mark.parametrize("drafter", [None, "nested"])
def test_a_shorter_request_in_a_used_seat_refreshes_its_cache(drafter: str | None) -> None:
    """The dual cache begins with a full pass, whatever the seat held before."""
    options: dict[str, Any] = {"policy": Dual()} | ({"drafter": Nested(2, 12)} if drafter else {})
    longer, shorter = one_a_pass(9, 24, 12), one_a_pass(3, 6, 6, seed=1)
    step = make_step(tiny(), [longer], **options)
    run(step, [longer])
    place(step, 0, shorter)
    assert run(step, [shorter])[0] == alone(tiny(), shorter, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_an_inactive_seat_does_not_change(kind: str) -> None:
    """A seat that waits for a step keeps every canvas tensor and its K/V, and goes on as if nothing had been."""
    cases, options = KINDS[kind]
    plain = run(make_step(tiny(), cases, **options()), cases)
    step = make_step(tiny(), cases, **options())
    num_canvas = step.cache.num_canvas
    with torch.inference_mode():
        for _ in range(2):
            step()
        step.canvas.active_S[1] = False
        before = canvas_state(step.canvas, 1) | {"k": step.cache.k[:, 1, :num_canvas].clone()}
        neighbour = canvas_state(step.canvas, 0)
        step()
        after = canvas_state(step.canvas, 1) | {"k": step.cache.k[:, 1, :num_canvas].clone()}
        assert {"token_SN", "pass_S"} <= changed(neighbour, canvas_state(step.canvas, 0))  # control: it was a step
        assert not changed(before, after)
        step.canvas.active_S[1] = True
    assert run(step, cases) == plain


# --- no host decisions


class NoLooking(TorchDispatchMode):
    """Raises where a value leaves the device, or decides about a shape."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "equal", "is_nonzero", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.FORBIDDEN or name.startswith(("_unique", "unique", "nonzero")):
            raise AssertionError(f"{name} waits for the device")
        if name.startswith(("index", "_unsafe_index")) and isinstance(args[1], (list, tuple)):
            looks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            assert not looks, f"{name} with a boolean mask waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_looking(step: FixedStep) -> Iterator[None]:
    """Inside, the step must not look. Inference mode is off, since it hides the parts of composite operators. The
    rotary table is read as on a device: on the CPU it grows on demand."""
    rope = step.model.rope
    table = rope.reserve(step.canvas.capacity, step.canvas.device)

    def refuse(self: Tensor, *args: Any) -> Any:  # noqa: ARG001
        raise AssertionError("reading values waits for the device")

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), NoLooking():
        patch.setattr(rope, "at", lambda pos: (table[0][pos], table[1][pos]))
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(Tensor, name, refuse)
        yield


ORIGIN = {"alg": "origin", "min_tokens": 3}
BLIND_KINDS: dict[str, tuple[Callable[[], Sequence[Case]], Callable[[], dict[str, Any]]]] = {
    "whole": (mixed, lambda: {"frontier": Whole()}),
    "window": (mixed, lambda: {"frontier": Window()}),
    "blocks": (mixed, dict),
    "origin": (
        lambda: [request(5, 8, 4, rule={"steps": steps} | more) for steps, more in ((8, {}), (4, ORIGIN))],
        dict,
    ),
    "pipeline-stop-adding": (lambda: PIPELINED, lambda: {"frontier": Pipeline(stop_adding_only=True)}),
    **{kind: (lambda cases=cases: cases, options) for kind, (cases, options) in KINDS.items()},
}


@pytest.mark.parametrize("kind", BLIND_KINDS)
def test_a_step_makes_no_host_decision(kind: str) -> None:
    """Whole steps without one operator that reads a value back or whose output shape depends on values."""
    cases, options = BLIND_KINDS[kind]
    step = make_step(tiny(), cases(), **options())
    with no_looking(step):
        for _ in range(4):
            step()
    assert (step.canvas.commit_pass_SN > 1).any()


def _item(mask: Tensor) -> Any:
    return mask.sum().item()


PEEKS: dict[str, Callable[[Tensor], Any]] = {
    "item": _item,
    "bool": lambda mask: bool(mask.any()),
    "tolist": lambda mask: mask.tolist(),
    "nonzero": lambda mask: mask.nonzero(),
    "where": lambda mask: torch.where(mask),
    "masked_select": lambda mask: mask.masked_select(mask),
    "index": lambda mask: mask[mask],
    "index_put": lambda mask: mask.clone().__setitem__(mask, True),
    "unique": lambda mask: mask.unique(),
    "equal": lambda mask: torch.equal(mask, mask),
}


@pytest.mark.parametrize("peek", PEEKS)
def test_a_frontier_that_looks_is_caught(peek: str) -> None:
    """Negative control: each way of reading a value trips the guard."""

    class Looking(Blocks):
        def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
            view = super().advance(canvas, params)
            PEEKS[peek](view.candidate_SN)
            return view

    step = make_step(tiny(), TWO_SEATS, frontier=Looking())
    with pytest.raises(AssertionError, match="waits for the device"), no_looking(step):
        step()


# --- D2F's pipeline


@st.composite
def pipelined(draw: st.DrawFn) -> Case:
    """A request of the block pipeline; the last block may be shorter, an end of text may come."""
    return request(
        draw(st.integers(1, 20)),
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


def pipeline_step(model: Transformer, cases: Sequence[Case], *, cached: bool = True) -> FixedStep:
    return make_step(model, cases, frontier=Pipeline(), **({"policy": BlockCausal()} if cached else {}))


@drawn
@given(st.lists(pipelined(), min_size=1, max_size=4), st.sampled_from(MODELS))
def test_the_block_causal_cache_is_exact(cases: list[Case], name: str) -> None:
    """Cached and uncached runs under the same mask agree in tokens, passes and the order of commits."""
    cached, uncached = (pipeline_step(tiny(name), cases, cached=cached) for cached in (True, False))
    assert run(cached, cases) == run(uncached, cases)


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


def sealed_positions(step: FixedStep, seat: int) -> Tensor:
    """bool [N]"""
    canvas = step.canvas
    state_N = canvas.block_state_SK[seat].gather(0, canvas.block_SN[seat].long())
    return (state_N == SEALED) & (canvas.pos_1N()[0] < canvas.end_S[seat])


@torch.inference_mode()
def assert_sealed(step: FixedStep, cases: Sequence[Case], model: Transformer) -> int:
    """K/V of sealed blocks against a fresh forward over prompt and answer; how many positions that were."""
    compared = 0
    for seat, each in enumerate(cases):
        token_N = step.canvas.token_SN[seat, : step.canvas.end_S[seat]].long()
        sealed = sealed_positions(step, seat)[: len(token_N)].nonzero().flatten()
        compared += len(sealed)
        fresh = fresh_kv(model, token_N, len(each.prompt), each.block_length)
        for ours, exact in zip((step.cache.k, step.cache.v), fresh):
            torch.testing.assert_close(ours[:, seat, sealed], exact[:, sealed], atol=1e-5, rtol=0)
    return compared


@drawn
@given(st.lists(pipelined(), min_size=1, max_size=3))
def test_every_step_of_the_pipeline_keeps_its_promises(cases: list[Case]) -> None:
    """Each step commits something for every request in it, blocks in flight stay within the depth, the count of
    undecided positions is that of MASK tokens, sealed entries never change again, and they are exact."""
    step = pipeline_step(tiny(), cases)
    passes, canvas = watch(step), step.canvas
    depth_S1, sealed_before = step.params.depth_S[:, None], [sealed_positions(step, s) for s in range(len(cases))]
    with torch.inference_mode():
        while canvas.active_S.any():
            active_S, end_S, final_S = canvas.active_S.clone(), canvas.end_S.clone(), canvas.final_SN.sum(1)
            before = step.cache.k.clone(), step.cache.v.clone()
            step()
            assert torch.equal(canvas.final_SN.sum(1) > final_S, active_S)
            assert (canvas.end_S <= end_S).all()
            state_SK = passes[-1].block_state_SK
            assert (((state_SK == OPEN) | (state_SK == FULL)).sum(1, keepdim=True) <= depth_S1).all()
            masks_SN = (canvas.token_SN == canvas.mask_token_id) & (canvas.pos_1N() < canvas.end_S[:, None])
            told_S = column(step.readback, "num_undecided")
            assert torch.equal(masks_SN.sum(1)[active_S], told_S[active_S].long())
            for seat, sealed_N in enumerate(sealed_before):
                for old, new in zip(before, (step.cache.k, step.cache.v)):
                    at = sealed_N.nonzero().flatten()
                    assert torch.equal(old[:, seat, at], new[:, seat, at])
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
@given(st.integers(1, 20), st.integers(1, 14), st.integers(1, 6), st.integers(0, 9))
def test_shares_of_one_are_one_token_a_pass(prompt: int, length: int, block: int, seed: int) -> None:
    """A block is added when the last is full and nothing passes the threshold: one commit a pass, block after block,
    the tokens and the order of the plain frontier under the same mask without a cache."""
    said = {"rule": {"threshold": 1.0}, "strict": True}
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
@given(st.integers(1, 12), st.integers(5, 16), st.integers(4, 9), st.integers(1, 4), st.integers(0, 99))
def test_nested_drafts_give_the_answer_of_one_token_a_pass(
    prompt: int, length: int, block: int, num_drafts: int, seed: int
) -> None:
    """Same tokens with the same cache, in no more passes, with any number of drafts and a shorter last block."""
    each = one_a_pass(prompt, length, block, seed)
    slow = alone(tiny(), each, policy=Dual())
    step = make_step(tiny(), [each], policy=Dual(), drafter=Nested(num_drafts, block))
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


@pytest.mark.parametrize("drafter", [TwoPass(), TwoPass(num_context=2), Nested(4, 2)])
def test_a_drafter_whose_lists_do_not_fit_is_refused(drafter: TwoPass | Nested) -> None:
    """More context rows, searched positions or drafts than there can be: an error at once, not a crash inside."""
    with pytest.raises(ConfigError, match=r"use smaller|do not fit"):
        make_step(tiny(), [one_a_pass(1, 2, 2)], policy=Dual(), drafter=drafter)


@pytest.mark.parametrize("drafter", [TwoPass(num_context=3, num_search=3), Nested(2, 8)])
def test_a_drafters_lists_may_fill_the_canvas(drafter: TwoPass | Nested) -> None:
    """Lists as long as the canvas, and a block width beyond it, are in order: fewer entries are used."""
    each = one_a_pass(1, 2, 2)
    each = replace(each, params=replace(each.params, gamma=2.0))
    assert alone(tiny(), each, policy=Dual(), drafter=drafter).token_ids == alone(tiny(), each, policy=Dual()).token_ids


# --- what the host reads


@pytest.mark.parametrize("kind", KINDS)
def test_the_readback_tells_the_truth_and_only_grows(kind: str) -> None:
    """Settled and pass counts never fall, ends never rise, undecided counts reach 0 as the seat stops."""
    cases, options = KINDS[kind]
    cases = [*cases, replace(cases[0], params=replace(cases[0].params, eos=COMMON_TOKENS))]
    step = make_step(tiny(), cases, **options())
    told = torch.stack(trace(step)).long()
    by = {name: told[:, :, column_] for column_, name in enumerate(READBACK)}
    active = by["active"].bool()
    assert (by["num_settled"].diff(dim=0) >= 0).all()
    assert torch.equal(by["num_steps"], by["active"].cumsum(0))
    assert (by["end"].diff(dim=0) <= 0).all()
    assert not by["overflow"].any()
    assert (by["num_undecided"][active].unsqueeze(0) >= 0).all()
    assert not by["num_undecided"][-1].any()
    assert torch.equal(active[1:], active[:-1] & (by["num_undecided"][:-1] > 0))
    assert (by["num_rows"] > 0).eq(active).all()
    for seat, each in enumerate(cases):
        got = result(step, seat, each)
        assert by["num_settled"][-1, seat] == len(got.token_ids) == by["end"][-1, seat] - len(each.prompt)
        assert by["num_steps"][-1, seat] == got.num_passes


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_after_the_end_changes_nothing(kind: str) -> None:
    """A step that was launched before the host saw the end: no canvas tensor and no canvas entry changes."""
    cases, options = KINDS[kind]
    step = make_step(tiny(), cases, **options())
    trace(step)
    num_canvas, seats = step.cache.num_canvas, range(len(cases))
    before = [canvas_state(step.canvas, seat) for seat in seats]
    kv, settled_S = step.cache.k[:, :, :num_canvas].clone(), column(step.readback, "num_settled").clone()
    with torch.inference_mode():
        for _ in range(2):
            step()
    assert not any(changed(before[seat], canvas_state(step.canvas, seat)) for seat in seats)
    assert torch.equal(kv, step.cache.k[:, :, :num_canvas])
    assert torch.equal(settled_S, column(step.readback, "num_settled"))
    assert not column(step.readback, "active").any()
    assert not column(step.readback, "num_rows").any()


@pytest.mark.parametrize("budget", ["num_rows", "num_scored"])
def test_a_budget_that_is_too_small_is_told(budget: str) -> None:
    """Rows and candidates that did not fit are counted seat by seat; with enough of both the count is 0."""
    step = make_step(tiny(), TWO_SEATS, seats=3)
    capacity = step.canvas.capacity
    step.budgets = replace(Budgets(capacity, capacity), **{budget: 2})
    with torch.inference_mode():
        step()
    rows, candidates = ([each.size for each in TWO_SEATS], [each.block_length for each in TWO_SEATS])
    wanted = rows if budget == "num_rows" else candidates
    assert column(step.readback, "overflow").tolist() == [*(each - 2 for each in wanted), 0]
    enough = make_step(tiny(), TWO_SEATS, seats=3)
    with torch.inference_mode():
        enough()
    assert not column(enough.readback, "overflow").any()
