"""Steps of every kind for tests of what they promise, and a record of each pass as it looks from outside.

L layers, S seats, E pool entries, N canvas positions, M rows of a pass, X scratch columns
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
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
    case,
    make_step,
    run,
)
from models.checkpoints import random_model
from unmask import ops
from unmask.cache.context import MassSpec, PagedContext
from unmask.cache.policy import Limits, Prefix, Tracked
from unmask.cache.pool import PAGE_SIZE, PagePool
from unmask.config import SamplingParams
from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan
from unmask.decoding.frontier import Window
from unmask.decoding.params import NO_LIMIT
from unmask.engine.step import READBACK, Step
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


TWO_SEATS = (request(5, 12, 6), request(9, 9, 4, seed=1))
ENDING = [changed_to(each, eos=COMMON_TOKENS) for each in TWO_SEATS]
ONE_A_PASS = (one_a_pass(5, 12, 6), one_a_pass(9, 9, 4, seed=1))
PIPELINED = (request(5, 12, 4, tau_add=0.1, tau_act=0.5), request(9, 10, 3, seed=1, tau_add=0.5))

TRACKED = (
    request(5, 12, 6, window=4, refresh=6, track=3),
    request(9, 9, 4, seed=1, rule={"threshold": 0.7}, window=5, refresh=2, track=0),
)
"""Of the second, several tokens a step are committed with no budget to track any."""


class Forgetting(Tracked):
    """Tracks by mass alone."""

    def _tracked(self, canvas: Canvas, limits: Limits) -> Tensor:
        return super()._tracked(canvas, limits) & ~canvas.new_SN()


NUM_ROWS, NUM_SEARCH = 14, 4
DRAFTS = NUM_ROWS - 2  # scratch columns: context, drafts, masks
MASKS = DRAFTS + NUM_SEARCH


def two_pass() -> TwoPass:
    return TwoPass(num_rows=NUM_ROWS, num_search=NUM_SEARCH)


def isolated(cases: Sequence[Case], strict: bool | Sequence[bool]) -> list[Case]:
    """The requests with these isolations."""
    strict = [strict] * len(cases) if isinstance(strict, bool) else strict
    return [changed_to(each, isolated=asked) for each, asked in zip(cases, strict)]


def verify_passes(passes: Sequence[Pass]) -> list[Pass]:
    return [each for each in passes if each.verifies]


def kind_of(each: Pass, row: int) -> tuple[str, int]:
    """What a row of the second pass is, and its place in the order of the search."""
    scratch = int(each.plan.column_M[row]) - each.capacity
    if scratch < DRAFTS:
        return "context", -1
    return ("draft", scratch - DRAFTS) if scratch < MASKS else ("mask", scratch - MASKS)


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
"""One of every kind of step, requests in seats 0 and 1."""

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
