"""What a step promises whatever the numbers, in both of its forms: who sees what, what is written, and that no request,
no host and no replay changes anything. Every promise comes with a control that breaks it.

L layers, S seats, E pool entries, N canvas positions, M rows of a pass, X scratch columns, K searched positions
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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
    make_pool,
    make_step,
    place,
    result,
    run,
)
from models.checkpoints import random_model
from unmask import ops
from unmask.cache.context import MassSpec, PagedContext
from unmask.cache.policy import Limits, Prefix, Tracked
from unmask.cache.pool import PAGE_SIZE, PagePool
from unmask.config import SamplingParams
from unmask.core import layout
from unmask.core.canvas import FULL, OPEN, SEALED, Canvas
from unmask.core.rows import RowPlan
from unmask.decoding.drafter import Drafter
from unmask.decoding.frontier import FrontierView, Window
from unmask.decoding.params import NO_LIMIT, DecodeParams
from unmask.engine.step import READBACK, Budgets, Step
from unmask.errors import ConfigError
from unmask.models.attention import AttentionWeights, DenseContext
from unmask.models.loading import load_model
from unmask.models.transformer import Transformer

MODELS = ("tiny-llada", "tiny-llada-gqa")
COMMON_TOKENS = (54, 114, 93, 272)
"""Tokens that the tiny models like to predict: as ends of text they do occur."""

drawn = settings(max_examples=20, deadline=None, derandomize=True)
both_forms = pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "ragged"])


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


def changed_to(each: Case, **more: Any) -> Case:
    """The request with other fields of the rule."""
    return replace(each, params=replace(each.params, **more))


def one_a_pass(prompt: int, length: int, block: int, seed: int = 0, eos: tuple[int, ...] = ()) -> Case:
    """The most probable candidate of each pass, and no other."""
    return request(prompt, length, block, seed, eos, {"steps": length}, quota=(1,) * length)


Members = Callable[[], dict[str, Any]]


class Kind(NamedTuple):
    """Requests, and a fresh set of the axes' members, of a kind of step."""

    cases: Sequence[Case]
    members: Members = dict
    model: str = "tiny-llada"

    def step(self, cases: Sequence[Case] | None = None, **more: Any) -> Step:
        return make_step(tiny(self.model), cases or self.cases, **self.members(), **more)


def alone(model: Transformer, each: Case, **options: Any) -> Result:
    return run(make_step(model, [each], **options), [each])[0]


def column(readback: Tensor, name: str) -> Tensor:
    return readback[:, READBACK.index(name)]


@torch.inference_mode()
def trace(step: Step, limit: int = 200) -> list[Tensor]:
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


# --- where things lie in the pool


def canvas_entries(pool: PagePool, capacity: int) -> Tensor:
    """int64 [S, N]: the pool entry of every position of every seat."""
    pos_N = torch.arange(capacity)
    return pool.page_table_SP.long()[:, pos_N // PAGE_SIZE] * PAGE_SIZE + pos_N % PAGE_SIZE


def entries_of(step: Step, seat: int) -> Tensor:
    """int64 [N]"""
    return canvas_entries(step.pool, step.canvas.capacity)[seat]


def kv_of(step: Step, seat: int) -> dict[str, Tensor]:
    """K and V [L, N, Hkv, hd] of a seat's canvas."""
    at_N = entries_of(step, seat)
    return {"k": step.pool.k[:, at_N].clone(), "v": step.pool.v[:, at_N].clone()}


def fill_scratch(step: Step, value: float) -> None:
    """All entries that no canvas position has: every seat's scratch, and what padding writes."""
    for kv in (step.pool.k, step.pool.v):
        kv[:, step.pool.scratch_SX.flatten()] = value
        kv[:, :PAGE_SIZE] = value


# --- what a pass did, recorded from outside


@dataclass(frozen=True)
class Pass:
    """One forward of a step: its plan, what attention was told to read, the canvas at that time, and K/V around it."""

    plan: RowPlan
    sight: ops.Sight
    write_M: Tensor
    entry_SN: Tensor
    scratch_SX: Tensor
    token_SN: Tensor
    final_SN: Tensor
    end_S: Tensor
    block_SN: Tensor
    block_state_SK: Tensor
    pending_pos_SZ: Tensor
    pending_token_SZ: Tensor
    commit_pass_SN: Tensor
    mass_SN: Tensor
    pass_S: Tensor
    held_token_E: Tensor
    """Token of the row that last wrote an entry, -1 none; with this pass's writes."""
    held_pos_E: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    hidden_MD: Tensor
    pipelined: bool

    @property
    def capacity(self) -> int:
        return self.token_SN.shape[1]

    @property
    def is_padding_M(self) -> Tensor:
        return self.plan.column_M == self.plan.row_SE.shape[1] - 1

    @property
    def verifies(self) -> bool:
        """A second pass: no row of the canvas runs, and something is live."""
        return self.plan.live is not None and bool((self.plan.row_SE[:, : self.capacity] < 0).all())

    def rows(self) -> Iterator[tuple[int, int]]:
        """Seat and row of everything that is not padding."""
        for row in (~self.is_padding_M).nonzero().flatten().tolist():
            yield int(self.plan.seat_M[row]), row

    def canvas_rows(self, seat: int) -> list[int]:
        """Canvas positions of a seat that run."""
        positions: list[int] = (self.plan.row_SE[seat, : self.capacity] >= 0).nonzero().flatten().tolist()
        return positions

    def scratch_rows(self, seat: int, first: int, count: int) -> list[int]:
        """Rows of so many scratch columns, -1 where one does not run."""
        at: list[int] = self.plan.row_SE[seat, self.capacity + first :][:count].tolist()
        return at

    def seen(self, seat: int, row: int) -> list[int]:
        """Every entry that a row meets: its sweep and its part of the live list."""
        sight, see = self.sight, int(self.sight.see_M[row])
        entry_N = self.entry_SN[seat, :see]
        if sight.shadow_SN is not None:
            entry_N = entry_N[~sight.shadow_SN[seat, :see]]
        entries: list[int] = entry_N.tolist()
        if sight.live_SJ is not None and sight.live_bits_MJ is not None:
            entries += sight.live_SJ[seat][sight.live_bits_MJ[row]].tolist()
        return entries

    def sources(self, seat: int, row: int) -> dict[int, int]:
        """The entry in which a row meets each position; it must meet the positions up to its reach once each."""
        seen = [(int(self.held_pos_E[entry]), entry) for entry in self.seen(seat, row)]
        assert sorted(pos for pos, _ in seen) == list(range(self.reach(seat, row))), f"seat {seat}, row {row}"
        return dict(sorted(seen))

    def content(self, seat: int, row: int) -> dict[int, int]:
        """Token at each position as a row sees it."""
        return {pos: int(self.held_token_E[entry]) for pos, entry in self.sources(seat, row).items()}

    def reach(self, seat: int, row: int) -> int:
        """Everything that exists or, where blocks are in flight, everything up to the end of the row's block."""
        end = int(self.end_S[seat])
        if not self.pipelined:
            return end
        block_N = self.block_SN[seat, :end]
        own = block_N[int(self.plan.pos_M[row])]
        return int((block_N <= own).sum())


AT_THAT_TIME: tuple[str, ...] = (
    "token_SN",
    "final_SN",
    "end_S",
    "block_SN",
    "block_state_SK",
    "pending_pos_SZ",
    "pending_token_SZ",
)
AT_THAT_TIME += ("commit_pass_SN", "mass_SN", "pass_S")


def watch(step: Step) -> list[Pass]:
    """Records every pass that the step makes from now on."""
    passes: list[Pass] = []
    forward, canvas, pool = step._forward, step.canvas, step.pool
    held_token_E, held_pos_E = (torch.full(pool.k.shape[1:2], -1) for _ in range(2))
    entry_SN = canvas_entries(pool, canvas.capacity)

    def recorded(plan: RowPlan, counts_M: Tensor | None = None) -> tuple[Tensor, PagedContext]:
        before = pool.k.clone(), pool.v.clone()
        at_that_time = {name: getattr(canvas, name).clone() for name in AT_THAT_TIME}
        hidden_MD, context = forward(plan, counts_M)
        for held_E, value_M in ((held_token_E, plan.token_M), (held_pos_E, plan.pos_M)):
            held_E[context.write_M] = value_M.long()
        assert torch.equal(context.sight.entries()[:, : canvas.capacity], entry_SN[: canvas.num_seats])
        passes.append(
            Pass(
                plan=plan,
                sight=context.sight,
                write_M=context.write_M.clone(),
                entry_SN=entry_SN,
                scratch_SX=pool.scratch_SX,
                **at_that_time,
                held_token_E=held_token_E.clone(),
                held_pos_E=held_pos_E.clone(),
                before=before,
                after=(pool.k.clone(), pool.v.clone()),
                hidden_MD=hidden_MD.clone(),
                pipelined=isinstance(step.frontier, Pipeline),
            )
        )
        return hidden_MD, context

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
ENDING = [changed_to(each, eos=COMMON_TOKENS) for each in TWO_SEATS]
ONE_A_PASS = (one_a_pass(5, 12, 6), one_a_pass(9, 9, 4, seed=1))
PIPELINED = (request(5, 12, 4, tau_add=0.1, tau_act=0.5), request(9, 10, 3, seed=1, tau_add=0.5))
TRACKED = (
    request(5, 12, 6, window=4, refresh=6, track=3),
    request(9, 9, 4, seed=1, rule={"threshold": 0.7}, window=5, refresh=2, track=0),
)
"""Of the second, several tokens a step are committed with no budget to track any."""


@both_forms
@pytest.mark.parametrize("frontier", [Blocks, Whole])
def test_canvas_rows_see_the_canvas_as_it_is(frontier: type[Blocks] | type[Whole], fixed: bool) -> None:
    """With full recompute, every row meets every position once, holding what the canvas holds; until its end."""
    passes = watched_run(tiny(), [*TWO_SEATS, *ENDING], frontier=frontier(), fixed=fixed)
    assert any((each.end_S[2:4] < passes[0].end_S[2:4]).any() for each in passes)
    for each in passes:
        for seat, row in each.rows():
            content = each.content(seat, row)
            assert content == dict(enumerate(each.token_SN[seat, : each.end_S[seat]].tolist()))


CACHES = {
    "prefix": Kind(TWO_SEATS, lambda: {"policy": Prefix()}),
    "dual": Kind(TWO_SEATS, lambda: {"policy": Dual()}),
    "tracked": Kind(TRACKED, lambda: {"frontier": Window(), "policy": Tracked()}),
    "flash": Kind(TRACKED, lambda: {"frontier": Window(), "policy": Tracked(), "drafter": two_pass()}),
}


def has_latest_tokens(each: Pass) -> bool:
    """Of every canvas row: what it sees was written with the tokens that stand there now."""
    return all(
        list(each.content(seat, row).values()) == each.token_SN[seat, : each.end_S[seat]].tolist()
        for seat, row in each.rows()
        if each.plan.column_M[row] < each.capacity
    )


@both_forms
@pytest.mark.parametrize("kind", CACHES)
def test_no_cache_shows_a_mask_where_a_token_was_committed(kind: str, fixed: bool) -> None:
    """K/V may be of an earlier view, never of an earlier token: what a step commits runs in the next pass."""
    cases = [*CACHES[kind].cases, *(changed_to(each, eos=COMMON_TOKENS) for each in CACHES[kind].cases)]
    passes = watched_run(tiny(), cases, **CACHES[kind].members(), fixed=fixed)
    assert any(len(each.canvas_rows(0)) < each.end_S[0] for each in passes if not each.verifies)
    assert all(has_latest_tokens(each) for each in passes)


class Forgetting(Tracked):
    """Tracks by mass alone."""

    def _tracked(self, canvas: Canvas, limits: Limits) -> Tensor:
        return super()._tracked(canvas, limits) & ~canvas.new_SN()


def test_a_cache_that_leaves_out_new_tokens_shows_a_mask() -> None:
    """Negative control."""
    passes = watched_run(tiny(), TRACKED, frontier=Window(), policy=Forgetting())
    assert not all(has_latest_tokens(each) for each in passes)


@both_forms
def test_rows_of_the_pipeline_see_up_to_their_block_and_sealed_blocks_as_they_ended(fixed: bool) -> None:
    """Block-causal: nothing after the own block; what is not recomputed any more was written with its final tokens."""
    reaches = set()
    for each in watched_run(tiny(), PIPELINED, frontier=Pipeline(), policy=BlockCausal(), fixed=fixed):
        for seat, row in each.rows():
            content = each.content(seat, row)
            assert list(content.values()) == each.token_SN[seat, : len(content)].tolist()
            reaches.add(len(content))
    assert len(reaches) > 4


def nested_passes(num_drafts: int = 3, *, fixed: bool = True) -> list[Pass]:
    return watched_run(tiny(), ONE_A_PASS, policy=Dual(), drafter=Nested(num_drafts, block_width=6), fixed=fixed)


def nested_content(each: Pass, seat: int, row: int, width: int = 6) -> None:
    """A row of view z sees the first z drafts in its block, MASK or final tokens elsewhere in it."""
    scratch = int(each.plan.column_M[row]) - each.capacity
    view = 0 if scratch < 0 else 1 + scratch // width
    content = each.content(seat, row)
    undecided = (each.token_SN[seat] == 319).nonzero().flatten()
    current = each.block_SN[seat] == each.block_SN[seat, undecided[0]]
    expected = each.token_SN[seat].clone().long()
    for z in range(view):
        assert each.pending_pos_SZ[seat, z] >= 0
        expected[each.pending_pos_SZ[seat, z]] = each.pending_token_SZ[seat, z]
    for pos in current.nonzero().flatten().tolist():
        assert content[pos] == expected[pos]


@both_forms
def test_rows_of_nested_views_see_their_own_view_only(fixed: bool) -> None:
    """Each view is the canvas with one draft more, each position once; canvas rows never see a draft."""
    views = 0
    for each in nested_passes(fixed=fixed):
        for seat, row in each.rows():
            nested_content(each, seat, row)
        views += int((each.plan.row_SE[:, each.capacity :] >= 0).any())
    assert views > 2


NUM_ROWS, NUM_SEARCH = 14, 4
DRAFTS = NUM_ROWS - 2  # scratch columns: context, drafts, masks
MASKS = DRAFTS + NUM_SEARCH


def two_pass() -> TwoPass:
    return TwoPass(num_rows=NUM_ROWS, num_search=NUM_SEARCH)


def isolated(cases: Sequence[Case], strict: bool | Sequence[bool]) -> list[Case]:
    """The requests with these isolations."""
    strict = [strict] * len(cases) if isinstance(strict, bool) else strict
    return [changed_to(each, isolated=strict_) for each, strict_ in zip(cases, strict)]


def verify_passes(passes: Sequence[Pass]) -> list[Pass]:
    return [each for each in passes if each.verifies]


def kind_of(each: Pass, row: int) -> tuple[str, int]:
    """What a row of the second pass is, and its place in the order of the search."""
    scratch = int(each.plan.column_M[row]) - each.capacity
    if scratch < DRAFTS:
        return "context", -1
    return ("draft", scratch - DRAFTS) if scratch < MASKS else ("mask", scratch - MASKS)


def verify_content(each: Pass, seat: int, row: int, strict: bool, mask: int = 319) -> str:
    """The isolation table: what each kind of row sees at the searched positions, in their order, and where from."""
    source, content = each.sources(seat, row), each.content(seat, row)
    kind, i = kind_of(each, row)
    drafts, masks = (each.scratch_rows(seat, first, NUM_SEARCH) for first in (DRAFTS, MASKS))
    for j, (draft, mask_row) in enumerate(zip(drafts, masks)):
        assert (draft < 0) == (mask_row < 0)
        if draft < 0:
            continue
        pos = int(each.plan.pos_M[draft])
        if {"context": False, "draft": j <= i, "mask": j < i}[kind]:
            entry, token = each.scratch_SX[seat, DRAFTS + j], int(each.plan.token_M[draft])
        else:
            live = not strict or (kind, i) == ("mask", j)
            entry, token = each.scratch_SX[seat, MASKS + j] if live else each.entry_SN[seat, pos], mask
        assert (content[pos], source[pos]) == (token, int(entry)), (kind, i, j)
    for at in each.scratch_rows(seat, 0, DRAFTS):
        if at >= 0:
            pos = int(each.plan.pos_M[at])
            assert content[pos] == each.token_SN[seat, pos] != mask
            assert source[pos] == each.write_M[at]
    return kind


ISOLATIONS = {"strict": [True] * 4, "reference": [False] * 4, "mixed": [True, False, False, True]}


@both_forms
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_rows_of_the_second_pass_see_drafts_before_them_and_masks_after(isolation: str, fixed: bool) -> None:
    """Context rows see every searched position as MASK; draft i the drafts up to i; MASK i the drafts before i. The
    MASKs that are not a row's own are live ones or, in strict isolation, the canvas's: each request as it asks."""
    strict = ISOLATIONS[isolation]
    cases = isolated([*TWO_SEATS, *ENDING], strict)
    passes = verify_passes(watched_run(tiny(), cases, drafter=two_pass(), fixed=fixed))
    kinds = [verify_content(each, seat, row, strict[seat]) for each in passes for seat, row in each.rows()]
    assert {kind: kinds.count(kind) > 10 for kind in ("context", "draft", "mask")} == dict.fromkeys(
        ("context", "draft", "mask"), True
    )


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


@both_forms
def test_nothing_past_a_new_end_is_searched(fixed: bool) -> None:
    """An end of text that the first pass commits cuts the second: no row stands, and none looks, behind it."""
    plain = [request(5, 16, 16, seed, rule={"threshold": 0.97}) for seed in range(6)]
    answers = [alone(tiny(), each) for each in plain]
    cases = [
        changed_to(each, eos=(answer.token_ids[answer.commit_pass.index(1)],)) for each, answer in zip(plain, answers)
    ]
    first, second = watched_run(tiny(), cases, drafter=two_pass(), fixed=fixed)[:2]
    assert second.verifies
    assert (second.end_S < first.end_S).sum() >= 5
    for seat, row in second.rows():
        assert second.plan.pos_M[row] < second.end_S[seat]
        verify_content(second, seat, row, strict=True)


def test_a_position_is_seen_twice_without_the_shadow() -> None:
    """Negative control: the same plans without their shadow let rows meet positions twice."""
    nested = [each for each in nested_passes() if each.sight.shadow_SN is not None and each.sight.shadow_SN.any()]
    verify = verify_passes(watched_run(tiny(), TWO_SEATS, drafter=two_pass()))
    for each in (nested[0], verify[0]):
        bare = replace(each, sight=replace(each.sight, shadow_SN=None))
        with pytest.raises(AssertionError, match="seat"):
            [bare.content(seat, row) for seat, row in bare.rows()]


def test_the_isolation_table_tells_a_draft_from_a_mask() -> None:
    """Negative control: with drafts and MASK rows exchanged the content is not that of the table."""
    each = verify_passes(watched_run(tiny(), TWO_SEATS, drafter=two_pass()))[0]
    token_E, at_SX = each.held_token_E.clone(), each.scratch_SX[:, DRAFTS:]
    token_E[at_SX] = token_E[at_SX].roll(NUM_SEARCH, 1)
    wrong = replace(each, held_token_E=token_E)
    with pytest.raises(AssertionError):
        [verify_content(wrong, seat, row, strict=True) for seat, row in wrong.rows()]


def test_the_isolation_table_tells_the_isolations_apart() -> None:
    """Negative control: the rows of a request in strict isolation are not those of the reference's."""
    for strict in (True, False):
        each = verify_passes(watched_run(tiny(), isolated(TWO_SEATS, strict), drafter=two_pass()))[0]
        with pytest.raises(AssertionError):
            [verify_content(each, seat, row, not strict) for seat, row in each.rows()]


# --- isolation of the second pass


def first_verification(
    model: Transformer, strict: bool | Sequence[bool], steps: int = 2, *, fixed: bool = True
) -> tuple[Step, Pass]:
    """The second pass of an early step, all its searched positions in use. One request, or one of each isolation."""
    strict = [strict] if isinstance(strict, bool) else strict
    cases = [request(5, 14, 14, seed, rule={"threshold": 1.0}) for seed in range(len(strict))]
    step = make_step(model, isolated(cases, strict), drafter=two_pass(), fixed=fixed)
    passes = watch(step)
    with torch.inference_mode():
        for _ in range(steps):
            step()
    each = passes[-1]
    assert each.verifies
    assert all(min(each.scratch_rows(seat, DRAFTS, 2 * NUM_SEARCH)) >= 0 for seat in range(len(strict)))
    return step, each


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


# --- what a pass writes


CARRYING = [
    request(5, 12, 12, seed, rule={"steps": 4, "threshold": 0.95, "alg": "confidence_threshold_budget"})
    for seed in range(2)
]


def flash(**mass: Any) -> dict[str, Any]:
    return {"frontier": Window(), "policy": Tracked(MassSpec(first_layer=1, **mass)), "drafter": two_pass()}


KINDS = {
    "recompute": Kind(TWO_SEATS),
    "carry": Kind(CARRYING),
    "prefix": Kind(ONE_A_PASS, lambda: {"policy": Prefix()}),
    "dual": Kind(ONE_A_PASS, lambda: {"policy": Dual()}),
    "tracked": Kind(TRACKED, lambda: {"frontier": Window(), "policy": Tracked()}),
    "pipeline": Kind(PIPELINED, lambda: {"frontier": Pipeline(), "policy": BlockCausal()}),
    "nested": Kind(ONE_A_PASS, lambda: {"policy": Dual(), "drafter": Nested(3, 6)}),
    "two-pass": Kind(TWO_SEATS, lambda: {"drafter": two_pass()}),
    "two-pass-reference": Kind(isolated(TWO_SEATS, False), lambda: {"drafter": two_pass()}),
    "two-pass-dual": Kind(isolated(TWO_SEATS, (True, False)), lambda: {"policy": Dual(), "drafter": two_pass()}),
    "flash": Kind([changed_to(TRACKED[0], search=2, gamma=0.5), changed_to(TRACKED[1], product=True)], flash),
    "flash-softmax": Kind(isolated(TRACKED, (False, True)), lambda: flash(softmax=True)),
    "dream-dual": Kind(ONE_A_PASS, lambda: {"frontier": Blocks(lead=True), "policy": Dual()}, "tiny-dream"),
    "dream-pipeline": Kind(PIPELINED, lambda: {"frontier": Pipeline(), "policy": BlockCausal()}, "tiny-dream"),
    "dream-tracked": Kind(
        TRACKED, lambda: {"frontier": Window(), "policy": Tracked(refresh_rows=True, shift=1)}, "tiny-dream"
    ),
}


def assert_writes(each: Pass) -> None:
    """Canvas entries that no row of this pass claims are bit-identical after it."""
    untouched_E = each.entry_SN[each.plan.row_SE[:, : each.capacity] < 0]
    for before, after in zip(each.before, each.after):
        assert torch.equal(before[:, untouched_E], after[:, untouched_E])


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_writes_the_canvas_entries_of_its_canvas_rows_only(kind: str, fixed: bool) -> None:
    """A row that writes a canvas entry stands at that position with the canvas's own token; drafts write their seat's
    scratch, padding a page that nobody reads."""
    step = KINDS[kind].step(seats=3, fixed=fixed)
    passes = watch(step)
    run(step, KINDS[kind].cases)
    for each in passes:
        assert_writes(each)
        plan, padding_S1 = each.plan, torch.zeros_like(each.entry_SN[:, :1])
        assert not fixed or each.is_padding_M.any()
        scratch_SX = each.scratch_SX[:, : plan.row_SE.shape[1] - each.capacity - 1]
        own_SE = torch.cat((each.entry_SN, scratch_SX, padding_S1), 1)
        assert torch.equal(each.write_M, own_SE[plan.seat_M, plan.column_M])
        on_canvas_M = plan.column_M < each.capacity
        seat_M, pos_M = plan.seat_M[on_canvas_M], plan.column_M[on_canvas_M]
        assert torch.equal(plan.pos_M[on_canvas_M].long(), pos_M)
        assert torch.equal(plan.token_M[on_canvas_M], each.token_SN[seat_M, pos_M])
        read = {entry for seat, row in each.rows() for entry in each.seen(seat, row)}
        assert min(read, default=PAGE_SIZE) >= PAGE_SIZE


@both_forms
@pytest.mark.parametrize("strict", [True, False])
def test_the_second_pass_leaves_the_canvas_entries_alone(strict: bool, fixed: bool) -> None:
    """K/V of all canvas entries, bit for bit, before and after every verification."""
    cases = isolated(TWO_SEATS, strict)
    step = make_step(tiny(), cases, drafter=two_pass(), fixed=fixed)
    passes = watch(step)
    run(step, cases)
    for each in verify_passes(passes):
        at_E = each.entry_SN.flatten()
        for before, after in zip(each.before, each.after):
            assert torch.equal(before[:, at_E], after[:, at_E])
            assert not torch.equal(before, after) or each.is_padding_M.all()


def test_a_draft_written_to_the_canvas_is_noticed() -> None:
    """Negative control: a verification row that wrote its canvas entry would change it."""
    step, each = first_verification(tiny(), strict=True)
    (row,) = each.scratch_rows(0, DRAFTS, 1)
    column_M = each.plan.column_M.clone()
    column_M[row] = each.plan.pos_M[row]
    with torch.inference_mode():
        step._forward(replace(each.plan, column_M=column_M))
    wrong = replace(each, after=(step.pool.k.clone(), step.pool.v.clone()))
    with pytest.raises(AssertionError):
        assert_writes(wrong)


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_reads_what_nobody_wrote(kind: str, fixed: bool) -> None:
    """Absurd numbers in fresh entries and, between steps, in scratch: the run does not notice; and the entries of
    no request keep them. (Finite ones: under a mask, kernels multiply values by 0.)"""
    cases = KINDS[kind].cases
    plain = run(KINDS[kind].step(seats=3, fixed=fixed), cases)
    step = KINDS[kind].step(seats=3, fixed=fixed)
    for kv in (step.pool.k, step.pool.v):
        kv.fill_(1e4)
    with torch.inference_mode():
        while step.canvas.active_S.any():
            step()
            fill_scratch(step, 1e4)
    assert [result(step, seat, each) for seat, each in enumerate(cases)] == plain
    sizes = [*(each.size for each in cases), 0]
    for seat, size in enumerate(sizes):
        assert all((kv[:, size:] == 1e4).all() for kv in kv_of(step, seat).values())
        assert all((kv[:, :size] != 1e4).all() for kv in kv_of(step, seat).values())


@both_forms
def test_absurd_numbers_in_entries_that_are_read_are_noticed(fixed: bool) -> None:
    """Negative control: the same numbers in the prompt's entries of a cached run change its answer."""
    kind = KINDS["dual"]
    plain = run(kind.step(fixed=fixed), kind.cases)
    step = kind.step(fixed=fixed)
    with torch.inference_mode():
        step()
        for seat in range(len(kind.cases)):
            step.pool.v[:, entries_of(step, seat)[:4]] = 1e4
    assert run(step, kind.cases) != plain


# --- the two forms


def history(step: Step) -> list[dict[str, Tensor]]:
    """Everything that the canvas holds and the host is told, after each step."""
    told = []
    with torch.inference_mode():
        while step.canvas.active_S.any():
            step()
            state = {name: value.clone() for name, value in vars(step.canvas).items() if isinstance(value, Tensor)}
            told.append(state | {"readback": step.readback.clone()})
            assert len(told) < 200
    return told


def assert_same(one: Sequence[dict[str, Tensor]], other: Sequence[dict[str, Tensor]]) -> None:
    """Equal decisions and counts; probabilities and masses up to rounding."""
    assert len(one) == len(other)
    for a, b in zip(one, other):
        for name in a:
            torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023


WEIGHED = {"threshold": 0.7, "cfg_scale": 1.5}
GUIDED = (request(5, 12, 6, rule=WEIGHED), request(9, 9, 4, seed=1))
FORMS = KINDS | {
    "guided": Kind(GUIDED),
    "guided-dual": Kind(GUIDED, lambda: {"policy": Dual()}),
    "guided-pipeline": Kind([changed_to(each, tau_add=0.3) for each in GUIDED], KINDS["pipeline"].members),
    "dream-guided": Kind([changed_to(each, tau_add=0.3) for each in GUIDED], KINDS["pipeline"].members, "tiny-dream"),
    "window": Kind([changed_to(each, window=3) for each in TWO_SEATS], lambda: {"frontier": Window()}),
    "drains": Kind([changed_to(each, eos=COMMON_TOKENS, drains=True) for each in PIPELINED], KINDS["pipeline"].members),
}


@pytest.mark.parametrize("kind", FORMS)
def test_both_forms_are_the_same_decoding(kind: str) -> None:
    """Step by step, in every tensor of the canvas and in all that the host reads."""
    fixed, ragged = (history(FORMS[kind].step(fixed=each)) for each in (True, False))
    assert_same(fixed, ragged)


def test_another_cache_is_another_decoding() -> None:
    """Negative control: histories differ where only the recomputed positions do."""
    with pytest.raises(AssertionError):
        assert_same(history(KINDS["dual"].step()), history(make_step(tiny(), ONE_A_PASS)))


def in_a_wider_pool(step: Step) -> Step:
    """The same canvas over a pool of four seats and three pages."""
    pool = make_pool(step.model, 4, 3 * PAGE_SIZE, step.drafter.num_scratch)  # type: ignore[arg-type]
    axes = {"frontier": step.frontier, "policy": step.policy, "drafter": step.drafter}
    return Step(step.model, step.canvas, step.params, pool, **axes)  # type: ignore[arg-type]


def grown(canvas: Canvas) -> Canvas:
    return canvas.grown(4, 3 * PAGE_SIZE, canvas.block_state_SK.shape[1] + 2)


@pytest.mark.parametrize("kind", [*KINDS, "drains"])
def test_a_ragged_step_goes_on_in_larger_tensors(kind: str) -> None:
    """More seats, positions, blocks and schedule steps in the middle of a run change nothing."""
    plain = run(FORMS[kind].step(fixed=False), FORMS[kind].cases)
    step = in_a_wider_pool(FORMS[kind].step(fixed=False))
    canvas, params = step.canvas, step.params
    with torch.inference_mode():
        for _ in range(2):
            step()
        step.resize(grown(canvas), params.grown(4, params.num_steps + 3))
        step()
        step.resize(step.canvas, step.params)
    assert run(step, FORMS[kind].cases) == plain


def test_a_ragged_step_without_its_state_is_noticed() -> None:
    """Negative control: what the last pass committed is part of what must be kept."""
    plain = run(KINDS["tracked"].step(fixed=False), TRACKED)
    step = in_a_wider_pool(KINDS["tracked"].step(fixed=False))
    with torch.inference_mode():
        for _ in range(2):
            step()
    larger = grown(step.canvas)
    larger.commit_pass_SN.clamp_(max=0)
    step.resize(larger, step.params.grown(4, step.params.num_steps))
    assert run(step, TRACKED) != plain


# --- alone or in a batch


def seated(model: Transformer, places: Mapping[int, Case], seats: int, guests: Sequence[Case], **options: Any) -> Step:
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
def run_with_guests(step: Step, places: Mapping[int, Case], guests: Sequence[Case]) -> list[tuple[Case, Result]]:
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


def assert_alone(model: Transformer, done: Sequence[tuple[Case, Result]], members: Members, *, fixed: bool) -> None:
    for each, got in done:
        assert got == alone(model, each, **members(), fixed=fixed), each


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


def verifying(cases: Sequence[Case]) -> list[Case]:
    """The requests with all ways of verification among them."""
    ways = (
        {"gamma": 2.0},
        {"gamma": 0.2, "isolated": False},
        {"gamma": 0.6, "product": True},
        {"gamma": 0.3, "search": 2},
    )
    return [changed_to(each, **ways[number % len(ways)]) for number, each in enumerate(cases)]


def tracking(cases: Sequence[Case]) -> list[Case]:
    """The requests with windows and budgets of many sizes among them."""
    sizes = ((5, 8, 4), (6, 4, 0), (NO_LIMIT, 8, 3), (7, NO_LIMIT, 6), (5, 5, NO_LIMIT))
    windows = [sizes[number % len(sizes)] for number in range(len(cases))]
    return [
        changed_to(each, window=window, refresh=refresh, track=track, interval=number % 3 * 2)
        for number, (each, (window, refresh, track)) in enumerate(zip(cases, windows))
    ]


GUEST_KINDS: dict[str, tuple[Callable[[], list[Case]], Members]] = {
    "recompute": (mixed, dict),
    "tracked": (lambda: tracking(mixed()), lambda: {"frontier": Window(), "policy": Tracked()}),
    "two-pass": (lambda: verifying(mixed()), lambda: {"drafter": two_pass()}),
    "flash": (lambda: tracking(verifying(mixed())), flash),
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


@both_forms
@pytest.mark.parametrize("kind", GUEST_KINDS)
def test_a_request_does_not_feel_its_neighbours(kind: str, fixed: bool) -> None:
    """Eight seats, two of them empty, mixed rules; requests that join later into freed seats, in other phases. Each
    has the tokens, the passes and the commits that it has alone."""
    cases, members = GUEST_KINDS[kind]
    first, guests = cases()[:6], cases()[6:]
    places = dict(zip((0, 1, 3, 4, 6, 7), first))
    step = seated(tiny(), places, 8, guests, **members(), fixed=fixed)
    done = run_with_guests(step, places, guests)
    assert len(done) == len(first) + len(guests)
    assert_alone(tiny(), done, members, fixed=fixed)


@both_forms
def test_all_rules_in_one_batch_of_gqa(fixed: bool) -> None:
    """The same for shared key heads, every rule at once."""
    cases, model = mixed(), tiny(MODELS[1])
    done = list(zip(cases, run(make_step(model, cases, seats=11, fixed=fixed), cases)))
    assert_alone(model, done, dict, fixed=fixed)


@both_forms
def test_a_neighbours_row_is_noticed(fixed: bool) -> None:
    """Negative control: a step that reads another seat's K/V gives other answers than the request alone."""
    cases = mixed()[:3]
    step = make_step(tiny(), cases, fixed=fixed)
    step.pool.page_table_SP.copy_(step.pool.page_table_SP[:1].expand_as(step.pool.page_table_SP).clone())
    with pytest.raises(AssertionError):
        assert_alone(tiny(), list(zip(cases, run(step, cases))), dict, fixed=fixed)


LATER: dict[str, Members] = {
    "dual": lambda: {"policy": Dual()},
    "nested": lambda: {"policy": Dual(), "drafter": Nested(2, 12)},
    "prefix": lambda: {"policy": Prefix()},
    "flash": flash,
}


@both_forms
@pytest.mark.parametrize("kind", LATER)
def test_a_shorter_request_in_a_used_seat_refreshes_its_cache(kind: str, fixed: bool) -> None:
    """A cache begins with a full pass, whatever the seat held before."""
    longer, shorter = tracking([one_a_pass(9, 24, 12), one_a_pass(3, 6, 6, seed=1)])
    step = make_step(tiny(), [longer], **LATER[kind](), fixed=fixed)
    run(step, [longer])
    place(step, 0, shorter)
    assert run(step, [shorter])[0] == alone(tiny(), shorter, **LATER[kind](), fixed=fixed)


@both_forms
@pytest.mark.parametrize("held", [False, True], ids=["inactive", "held"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_inactive_seat_does_not_change(kind: str, held: bool, fixed: bool) -> None:
    """A seat that waits for a step keeps every canvas tensor and its K/V, and goes on as if nothing had been; also if
    it was looked at and then held back."""
    cases = KINDS[kind].cases
    plain = run(KINDS[kind].step(fixed=fixed), cases)
    step = KINDS[kind].step(fixed=fixed)
    with torch.inference_mode():
        for _ in range(2):
            step()
        before, waits_S = canvas_state(step.canvas, 1) | kv_of(step, 1), torch.tensor([False, True])
        neighbour = canvas_state(step.canvas, 0)
        if held:
            step.run(step.hold(step.look(), waits_S))
        else:
            step.canvas.active_S[1] = False
            step()
        step.canvas.active_S[1] = True
        after = canvas_state(step.canvas, 1) | kv_of(step, 1)
        assert {"token_SN", "pass_S"} <= changed(neighbour, canvas_state(step.canvas, 0))  # control: it was a step
        assert not changed(before, after)
    assert run(step, cases) == plain


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_a_seat_may_wait_for_its_first_pass(kind: str, fixed: bool) -> None:
    """The largest pass waits for the row budget: here three steps, beside a neighbour that goes on."""
    cases = KINDS[kind].cases
    plain = run(KINDS[kind].step(fixed=fixed), cases)
    step, waits_S = KINDS[kind].step(fixed=fixed), torch.tensor([False, True])
    before = canvas_state(step.canvas, 1)
    with torch.inference_mode():
        for _ in range(3):
            step.run(step.hold(step.look(), waits_S))
            assert not column(step.readback, "num_rows")[1]
            step.canvas.active_S |= waits_S
    assert not changed(before, canvas_state(step.canvas, 1))
    assert run(step, cases) == plain


@both_forms
@pytest.mark.parametrize("kind", ["guided-dual", "dream-guided"])
def test_a_guided_request_waits_with_its_twin(kind: str, fixed: bool) -> None:
    """In the first step and later on, beside a neighbour that goes on."""
    cases = FORMS[kind].cases
    plain = run(FORMS[kind].step(fixed=fixed), cases)
    step, waits_S = FORMS[kind].step(fixed=fixed), torch.tensor([True, True, False])
    with torch.inference_mode():
        for number in range(6):
            before = [canvas_state(step.canvas, seat) | kv_of(step, seat) for seat in (0, 1)]
            if number % 2:
                step()
                continue
            step.run(step.hold(step.look(), waits_S))
            step.canvas.active_S |= waits_S
            assert not any(
                changed(before[seat], canvas_state(step.canvas, seat) | kv_of(step, seat)) for seat in (0, 1)
            )
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
def no_looking(step: Step) -> Iterator[None]:
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
BLIND_KINDS = FORMS | {
    "whole": Kind(mixed(), lambda: {"frontier": Whole()}),
    "window": Kind(mixed(), lambda: {"frontier": Window()}),
    "blocks": Kind(mixed()),
    "origin": Kind([request(5, 8, 4, rule={"steps": steps} | more) for steps, more in ((8, {}), (4, ORIGIN))]),
    "uncached-pipeline": Kind(PIPELINED, lambda: {"frontier": Pipeline()}),
    "flash-mixed": Kind(tracking(verifying(mixed())), flash),
}


@pytest.mark.parametrize("kind", BLIND_KINDS)
def test_a_step_makes_no_host_decision(kind: str) -> None:
    """Whole steps without one operator that reads a value back or whose output shape depends on values."""
    step = BLIND_KINDS[kind].step()
    with no_looking(step):
        for _ in range(4):
            step()
    assert (step.canvas.commit_pass_SN > 1).any()


def test_a_ragged_step_looks() -> None:
    """Negative control: without budgets a step counts its rows on the host."""
    step = KINDS["recompute"].step(fixed=False)
    with pytest.raises(AssertionError, match="waits for the device"), no_looking(step):
        step()


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
    step = make_step(tiny(), [one_a_pass(1, 2, 2)])
    for num_scratch, fits in ((drafter.num_scratch - 1, False), (drafter.num_scratch, True)):
        pool = make_pool(tiny(), 1, 3, num_scratch)
        members = {"frontier": Blocks(), "policy": Dual(), "drafter": drafter}
        if fits:
            Step(tiny(), step.canvas, step.params, pool, **members)  # type: ignore[arg-type]
            return
        with pytest.raises(ConfigError, match=f"needs {num_scratch + 1} scratch entries"):
            Step(tiny(), step.canvas, step.params, pool, **members)  # type: ignore[arg-type]


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
    drafter = two_pass() if verified else Drafter()
    return run(make_step(tiny(), cases, frontier=Window(), drafter=drafter, **options), cases)


WINDOWED = [changed_to(each, window=5) for each in verifying([*TWO_SEATS, *ENDING])]


@both_forms
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "verified"])
def test_tracking_everything_is_the_uncached_run(drafter: bool, fixed: bool) -> None:
    """Windows and budgets as large as the canvas; or a refresh in every pass. (Context is taken by mass: without room
    for all of it, a verified run depends on who tracks.)"""
    cases = [changed_to(each, search=1) for each in WINDOWED] if drafter else WINDOWED
    plain = windowed_run(cases, drafter, fixed=fixed)
    assert windowed_run(cases, drafter, policy=Tracked(), fixed=fixed) == plain
    refreshed = [changed_to(each, refresh=1, track=0, interval=1) for each in cases]
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


# --- what the host reads


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_the_readback_tells_the_truth_and_only_grows(kind: str, fixed: bool) -> None:
    """Settled and pass counts never fall, ends never rise, undecided counts reach 0 as the seat stops."""
    cases = [*KINDS[kind].cases, changed_to(KINDS[kind].cases[0], eos=COMMON_TOKENS)]
    step = KINDS[kind].step(cases, fixed=fixed)
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


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_replaying_after_the_end_changes_nothing(kind: str, fixed: bool) -> None:
    """A step that was launched before the host saw the end: no canvas tensor and no canvas entry changes."""
    step = KINDS[kind].step(fixed=fixed)
    trace(step)
    seats = range(len(KINDS[kind].cases))
    before = [canvas_state(step.canvas, seat) | kv_of(step, seat) for seat in seats]
    settled_S = column(step.readback, "num_settled").clone()
    with torch.inference_mode():
        for _ in range(2):
            step()
    assert not any(changed(before[seat], canvas_state(step.canvas, seat) | kv_of(step, seat)) for seat in seats)
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
