"""One step as one program: fixed shapes, device tensors, nothing read back in between, so that it can be captured.

S seats, N positions, Q rows, C scored slots, D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unmask.cache.dense import DenseCache, DenseCacheContext
from unmask.cache.policy import CachePolicy
from unmask.core.canvas import Canvas
from unmask.core.rows import FixedPlan, canvas_rows, slots, spread
from unmask.core.scores import Scores
from unmask.decoding.drafter import Nested, Search, TwoPass
from unmask.decoding.frontier import Frontier, FrontierView, Pipeline
from unmask.decoding.params import DecodeParams
from unmask.decoding.rule import choose
from unmask.decoding.sample import TOKEN, VERIFY
from unmask.engine.scoring import Model, banned_ids, guide, predict
from unmask.errors import ConfigError
from unmask.ops import LogitStats

READBACK = ("num_settled", "end", "num_steps", "num_undecided", "num_rows", "num_accepted", "overflow", "active")
"""Columns of what a step tells the host."""


@dataclass(frozen=True)
class Budgets:
    """Static sizes of a step, per seat."""

    num_rows: int
    """Canvas rows of a pass."""
    num_scored: int
    """Candidates that are scored."""


@dataclass(frozen=True)
class Work:
    """What is known before the forward."""

    view: FrontierView
    plan: FixedPlan
    slot_SC: Tensor
    """Candidates, packed: positions, the capacity where a slot is empty."""
    pos_SC: Tensor
    row_SC: Tensor
    """Row that scores the slot."""
    twin_row_SC: Tensor
    """The same position's row in the seat's guidance twin; in a seat without one, its own."""
    scored_SC: Tensor
    overflow_S: Tensor


@dataclass(frozen=True)
class Columns:
    """What the rule looked at."""

    view: FrontierView
    scores: Scores


Commits = tuple[Tensor, Tensor, Tensor]
"""bool, token and probability, each [S, N]."""


class FixedStep:
    """The step over tensors that are allocated once. Call it, or capture it and replay: the same functions run.

    A seat whose canvas is inactive has no rows and does not change. `readback` int32 [S, 8] holds `READBACK`. With
    ``compiled`` the parts around the network go through torch.compile.
    """

    def __init__(
        self,
        model: Model,
        canvas: Canvas,
        params: DecodeParams,
        cache: DenseCache,
        budgets: Budgets,
        *,
        frontier: Frontier,
        policy: CachePolicy,
        drafter: Nested | TwoPass | None = None,
        unknown_ids: Sequence[int] = (),
        compiled: bool = False,
    ) -> None:
        self.model, self.canvas, self.params, self.cache, self.budgets = model, canvas, params, cache, budgets
        self.frontier, self.policy, self.drafter = frontier, policy, drafter
        device = canvas.device
        self.banned_b = banned_ids(model, unknown_ids)
        self.seat_S = torch.arange(canvas.num_seats, device=device)
        self.readback = torch.zeros(canvas.num_seats, len(READBACK), dtype=torch.int32, device=device)
        self.shift = model.config.logit_shift
        self.saved_SD = torch.zeros(canvas.num_seats, model.head.shape[1], dtype=model.head.dtype, device=device)
        self._check_sizes()
        if compiled:
            self._compile()

    def _check_sizes(self) -> None:
        """A drafter must suit the network, and its static shapes must fit the step's."""
        drafter, scored, capacity = self.drafter, self.budgets.num_scored, self.canvas.capacity
        if drafter is not None and self.shift:
            raise ConfigError(
                f"{type(drafter).__name__} scores a position from its own row, and this network from row "
                f"p - {self.shift}; run it without a drafter"
            )
        if isinstance(drafter, TwoPass) and (drafter.num_search > scored or drafter.num_context > capacity):
            raise ConfigError(
                f"verification searches {drafter.num_search} of {scored} scored candidates with {drafter.num_context} "
                f"context rows on a canvas of {capacity}; use smaller ones"
            )
        if isinstance(drafter, Nested) and drafter.num_drafts > drafter.block_width:
            raise ConfigError(f"{drafter.num_drafts} nested drafts do not fit a block of {drafter.block_width}")

    def _compile(self) -> None:
        """Fuse everything but the network and the head: dozens of small kernels become a few."""

        def fused(method: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(method, fullgraph=True, dynamic=False)

        for name in ("_plan", "_with_saved", "_settle", "_settle_nested", "_verify_rows", "_settle_verified"):
            setattr(self, name, fused(getattr(self, name)))

    def __call__(self) -> None:
        """One step of every active seat."""
        if self.params.needs.guided and self.drafter is not None:
            raise ConfigError(f"{type(self.drafter).__name__} cannot verify guided requests; leave cfg_scale out")
        work = self._plan()
        hidden_SQD = self._forward(work.plan)
        if self.shift:
            hidden_SQD = self._with_saved(work, hidden_SQD)
        hidden_SCD = _rows(hidden_SQD, work.row_SC)
        if self.params.needs.guided:
            hidden_SCD = self._guided(hidden_SCD, hidden_SQD, work.twin_row_SC)
        stats = self._predict(hidden_SCD, work.pos_SC)
        if isinstance(self.drafter, Nested):
            rows_SX = self.drafter.scored_rows(work.plan)
            drafted = self._predict(_rows(hidden_SQD, rows_SX), work.plan.pos_SQ.gather(1, rows_SX))
            self._settle_nested(self.drafter, work, stats, drafted)
            return
        columns, commit_SC = self._settle(work, stats)
        if isinstance(self.drafter, TwoPass):
            self._verify(self.drafter, work, columns, commit_SC)

    # --- the network, and the head

    def _forward(self, plan: FixedPlan) -> Tensor:
        hidden: Tensor = self.model(plan.token_SQ, DenseCacheContext(plan, self.cache, self.model.rope))
        return hidden

    def _with_saved(self, work: Work, hidden_SQD: Tensor) -> Tensor:
        """The rows and, behind them, the one kept from an earlier pass; then keep the row that scores the leftmost
        undecided position, if it ran: once its block is sealed it does not run again."""
        canvas = self.canvas
        out_SQD = torch.cat((hidden_SQD, self.saved_SD[:, None]), 1)
        open_SN = canvas.undecided_SN()
        first_S1 = torch.where(open_SN, canvas.pos_1N(), canvas.capacity - 1).amin(1, keepdim=True).long()
        source_S1 = (first_S1 - self.shift).clamp(min=0)
        row_S1, ran_S1 = self._rows_of(work.plan, source_S1)
        row_SD = _rows(hidden_SQD, row_S1)[:, 0]
        keeps_S1 = ran_S1 & open_SN.any(1, keepdim=True)
        self.saved_SD.copy_(torch.where(keeps_S1, row_SD, self.saved_SD))
        canvas.saved_pos_S.copy_(torch.where(keeps_S1, source_S1, canvas.saved_pos_S[:, None])[:, 0])
        return out_SQD

    def _predict(self, hidden_SCD: Tensor, pos_SC: Tensor, purpose: int = TOKEN) -> LogitStats:
        """Predictions [S * C] for positions, each from its hidden row."""
        seat_C = self.seat_S[:, None].expand_as(pos_SC).flatten()
        hidden_CD = hidden_SCD.flatten(0, 1)
        return predict(
            hidden_CD, self.model.head, self.banned_b, seat_C, pos_SC.flatten(), self.canvas, self.params, purpose
        )

    def _twin_S(self) -> Tensor:
        """Each seat's guidance twin; itself where it has none."""
        return torch.where(self.params.twin_S >= 0, self.params.twin_S, self.seat_S)

    def _guided(self, hidden_SCD: Tensor, hidden_SQD: Tensor, twin_row_SC: Tensor) -> Tensor:
        without_SCD = _rows(hidden_SQD[self._twin_S()], twin_row_SC)
        scale_SC, guided_SC = (
            x[:, None].expand(hidden_SCD.shape[:2]) for x in (self.params.guidance_S, self.params.twin_S >= 0)
        )
        return guide(hidden_SCD, without_SCD, scale_SC, guided_SC)

    # --- before the forward

    def _plan(self) -> Work:
        """Where tokens may be decided, which rows run, and which of them score what."""
        canvas, params, budgets = self.canvas, self.params, self.budgets
        view = self.frontier.advance(canvas, params)
        recompute_SN = self.policy.rows(canvas)
        plan = canvas_rows(canvas, recompute_SN, view.see_SN, budgets.num_rows, self.cache.trash)
        slot_SC, not_scored_S = slots(view.candidate_SN, budgets.num_scored)
        pos_SC = slot_SC.clamp(max=canvas.capacity - 1)
        source_SC = (pos_SC - self.shift).clamp(min=0)
        row_SC, ran_SC = self._rows_of(plan, source_SC)
        overflow_S = not_scored_S + (recompute_SN.sum(1) - budgets.num_rows).clamp(min=0)
        if isinstance(self.drafter, Nested):
            plan = self.drafter.rows(canvas, plan)
        twin_row_SC = row_SC
        if params.needs.guided:
            twin_row_SC, _ = self._rows_of(plan, source_SC, self._twin_S())
        if self.shift:
            kept_SC = ~ran_SC & (source_SC == canvas.saved_pos_S[:, None])
            row_SC = torch.where(kept_SC, plan.token_SQ.shape[1], row_SC)  # the saved row lies behind all others
            ran_SC = ran_SC | kept_SC
        return Work(view, plan, slot_SC, pos_SC, row_SC, twin_row_SC, ran_SC & (slot_SC < canvas.capacity), overflow_S)

    def _rows_of(self, plan: FixedPlan, pos_SC: Tensor, of_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Row of each position among the rows of its seat, or of seat ``of``, and whether there is one."""
        row_SQ = torch.arange(1, plan.pos_SQ.shape[1] + 1, device=pos_SC.device).expand_as(plan.pos_SQ)
        number_SN = spread(row_SQ, plan.pos_SQ, plan.valid_SQ, self.canvas.capacity)
        number_SC = (number_SN if of_S is None else number_SN[of_S]).gather(1, pos_SC)
        return (number_SC - 1).clamp(min=0), number_SC > 0

    # --- after it

    def _settle(self, work: Work, stats: LogitStats) -> tuple[Columns, Tensor]:
        """Rule and commits; the columns that the rule looked at, and which of them it chose."""
        values = (stats.token_C, stats.prob_C, stats.margin_C, stats.neg_entropy_C)
        scores = Scores(work.pos_SC, work.scored_SC, *(value.view_as(work.pos_SC) for value in values))
        view = work.view.at(work.slot_SC)
        commit_SC = choose(self.canvas, view, scores, self.params)
        self._commit(self._on_canvas(commit_SC, scores.pos_SW, scores.token_SN, scores.prob_SN))
        if not isinstance(self.drafter, TwoPass):  # its own pass ends the step
            self._end_step(work, self.seat_S * 0, self.seat_S * 0)
        return Columns(view, scores), commit_SC

    def _settle_nested(self, drafter: Nested, work: Work, stats: LogitStats, drafted: LogitStats) -> None:
        """Drafts that stand, the rule on the last view that does, and the next drafts."""
        canvas, capacity = self.canvas, self.canvas.capacity
        token_SN, prob_SN = (
            spread(value.view_as(work.pos_SC), work.pos_SC, work.scored_SC, capacity)
            for value in (stats.token_C, stats.prob_C)
        )
        shape = (canvas.num_seats, drafter.num_scratch)
        predicted = (drafted.token_C.view(shape), drafted.prob_C.view(shape))
        verdict = drafter.settle(canvas, work.view, token_SN, prob_SN, *predicted, self.params)
        scores = verdict.scores
        commit_SB = choose(canvas, verdict.view, scores, self.params)
        chosen = self._on_canvas(commit_SB, scores.pos_SW, scores.token_SN, scores.prob_SN)
        proved = self._on_canvas(verdict.accepted_SZ, canvas.pending_pos_SZ, canvas.pending_token_SZ, verdict.prob_SZ)
        self._commit(tuple(torch.where(proved[0], b, a) for a, b in zip(chosen, proved)))
        drafter.propose(canvas, verdict, commit_SB)
        self._end_step(work, verdict.accepted_SZ.sum(1), self.seat_S * 0)

    def _on_canvas(self, chosen_SW: Tensor, pos_SW: Tensor, token_SW: Tensor, prob_SW: Tensor) -> Commits:
        """Chosen columns as bool, token and probability on the canvas."""
        capacity = self.canvas.capacity
        values = (chosen_SW, token_SW, prob_SW)
        chosen_SN, token_SN, prob_SN = (spread(value, pos_SW, chosen_SW, capacity) for value in values)
        return chosen_SN, token_SN, prob_SN

    def _commit(self, commits: tuple[Tensor, ...], *, new_pass: bool = True) -> None:
        stops = not (isinstance(self.frontier, Pipeline) and self.frontier.stop_adding_only)
        eos_SE = self.params.eos_SE if stops else torch.full_like(self.params.eos_SE, -1)
        chosen_SN, token_SN, prob_SN = commits
        self.canvas.commit(chosen_SN, token_SN, prob_SN, eos_SE, new_pass=new_pass)
        if self.params.needs.guided:
            self.canvas.follow()

    def _verify(self, drafter: TwoPass, work: Work, columns: Columns, commit_SC: Tensor) -> None:
        """Flash-Verify's second forward, and its commits."""
        search, plan = self._verify_rows(drafter, columns, commit_SC)
        first = drafter.num_context + drafter.num_search
        rows_SK = torch.arange(first, first + drafter.num_search, device=self.canvas.device).expand_as(search.pos_SK)
        stats = self._predict(_rows(self._forward(plan), rows_SK), search.pos_SK, VERIFY)
        self._settle_verified(drafter, work, search, plan.valid_SQ, stats)

    def _verify_rows(self, drafter: TwoPass, columns: Columns, commit_SC: Tensor) -> tuple[Search, FixedPlan]:
        search = drafter.search(columns.view, columns.scores, commit_SC)
        search = replace(search, valid_SK=search.valid_SK & (search.pos_SK < self.canvas.end_S[:, None]))
        return search, drafter.rows(self.canvas, search)

    def _settle_verified(
        self, drafter: TwoPass, work: Work, search: Search, valid_SQ: Tensor, stats: LogitStats
    ) -> None:
        token_SK, prob_SK = (value.view_as(search.pos_SK) for value in (stats.token_C, stats.prob_C))
        agrees_SK = drafter.accept(search, token_SK, prob_SK, self.params)
        self._commit(self._on_canvas(agrees_SK, search.pos_SK, search.token_SK, prob_SK), new_pass=False)
        num_accepted_S = (agrees_SK & (search.pos_SK < self.canvas.end_S[:, None])).sum(1)
        self._end_step(work, num_accepted_S, valid_SQ.sum(1))

    def _end_step(self, work: Work, num_accepted_S: Tensor, num_more_rows_S: Tensor) -> None:
        if isinstance(self.frontier, Pipeline):
            self.frontier.retire(self.canvas)
        num_rows_S = work.plan.valid_SQ.sum(1) + num_more_rows_S
        self.canvas.count_rows(num_rows_S)
        self._tell(work, num_rows_S, num_accepted_S)

    def _tell(self, work: Work, num_rows_S: Tensor, num_accepted_S: Tensor) -> None:
        """Fill the readback; finished seats become inactive, so that a replay before the host looks changes nothing."""
        canvas = self.canvas
        num_undecided_S = canvas.undecided_SN().sum(1)
        columns = (
            canvas.num_settled_S(),
            canvas.end_S,
            canvas.pass_S,
            num_undecided_S,
            num_rows_S,
            num_accepted_S,
            work.overflow_S,
            canvas.active_S,
        )
        self.readback.copy_(torch.stack([column.int() for column in columns], 1))
        canvas.active_S &= num_undecided_S[canvas.leader_or_self_S()] > 0  # a twin rests when its leader does


def _rows(hidden_SQD: Tensor, row_SC: Tensor) -> Tensor:
    """Hidden rows [S, C, D] by number."""
    return hidden_SQD.gather(1, row_SC[:, :, None].expand(-1, -1, hidden_SQD.shape[2]))
