"""One step as one program: fixed shapes, device tensors, nothing read back in between, so that it can be captured.

S seats, N positions, Q rows, C scored slots, D hidden size
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.cache.dense import DenseCache, DenseCacheContext
from unmask.cache.policy import CachePolicy
from unmask.core.canvas import Canvas
from unmask.core.rows import FixedPlan, canvas_rows, slots
from unmask.core.scores import Scores
from unmask.decoding.drafter import Nested, TwoPass, Verdict
from unmask.decoding.frontier import Frontier, FrontierView, Pipeline
from unmask.decoding.params import DecodeParams
from unmask.decoding.rule import choose
from unmask.engine.runner import Model
from unmask.engine.scoring import predict
from unmask.ops import LogitStats

READBACK = ("num_settled", "end", "num_passes", "num_undecided", "num_rows", "num_accepted", "overflow", "active")
"""Columns of what a step tells the host."""


@dataclass(frozen=True)
class Budgets:
    """Static sizes of a step, per seat."""

    num_rows: int
    """Canvas rows of a pass."""
    num_scored: int
    """Candidates that are scored."""


class FixedStep:
    """The step over tensors that are allocated once. Call it, or capture it and replay: the same functions run.

    A seat whose canvas is inactive has no rows and does not change. `readback` int32 [S, 8] holds `READBACK`.
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
    ) -> None:
        self.model, self.canvas, self.params, self.cache, self.budgets = model, canvas, params, cache, budgets
        self.frontier, self.policy, self.drafter = frontier, policy, drafter
        device = canvas.device
        self.banned_b = torch.tensor([model.config.mask_token_id], device=device)
        self.seat_S = torch.arange(canvas.num_seats, device=device)
        self.readback = torch.zeros(canvas.num_seats, len(READBACK), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """One step of every active seat."""
        canvas, params = self.canvas, self.params
        view = self.frontier.advance(canvas, params)
        recompute_SN = self.policy.rows(canvas)
        plan = canvas_rows(canvas, recompute_SN, view.see_SN, self.budgets.num_rows, self.cache.trash)
        if isinstance(self.drafter, Nested):
            plan = self.drafter.rows(canvas, plan)
        hidden_SQD = self._forward(plan)
        scores = self._score(hidden_SQD, plan, view.candidate_SN)
        num_accepted_S = self._decide(view, plan, hidden_SQD, scores)
        if isinstance(self.frontier, Pipeline):
            self.frontier.retire(canvas)
        overflow_S = (recompute_SN.sum(1) - self.budgets.num_rows).clamp(min=0)
        overflow_S += (view.candidate_SN.sum(1) - self.budgets.num_scored).clamp(min=0)
        self._tell(plan.valid_SQ.sum(1), num_accepted_S, overflow_S)

    def _forward(self, plan: FixedPlan) -> Tensor:
        hidden: Tensor = self.model(plan.token_SQ, DenseCacheContext(plan, self.cache, self.model.rope))
        return hidden

    def _predict(self, hidden_SQD: Tensor, row_SC: Tensor, pos_SC: Tensor) -> LogitStats:
        """Predictions [S * C] for positions, each from its row."""
        index = row_SC.clamp(max=hidden_SQD.shape[1] - 1)[:, :, None].expand(-1, -1, hidden_SQD.shape[2])
        seat_C = self.seat_S[:, None].expand_as(pos_SC).flatten()
        hidden_CD = hidden_SQD.gather(1, index).flatten(0, 1)
        return predict(hidden_CD, self.model.head, self.banned_b, seat_C, pos_SC.flatten(), self.canvas, self.params)

    def _score(self, hidden_SQD: Tensor, plan: FixedPlan, candidate_SN: Tensor) -> Scores:
        """Candidates in their slots, each from row p - shift of the canvas rows, if that ran."""
        capacity, num_rows = self.canvas.capacity, self.budgets.num_rows
        slot_SC, _ = slots(candidate_SN, self.budgets.num_scored)
        pos_SC = slot_SC.clamp(max=capacity - 1)
        pos_SR, valid_SR = plan.pos_SQ[:, :num_rows], plan.valid_SQ[:, :num_rows]
        row_SN = torch.full((self.canvas.num_seats, capacity + 1), num_rows, device=pos_SC.device)
        row_R = torch.arange(num_rows, device=pos_SC.device).expand_as(pos_SR)
        row_SN.scatter_(1, torch.where(valid_SR, pos_SR, capacity), row_R)
        row_SN[:, capacity] = num_rows
        row_SC = row_SN.gather(1, (pos_SC - self.model.config.logit_shift).clamp(min=0))
        scored_SC = (slot_SC < capacity) & (row_SC < num_rows)
        stats = self._predict(hidden_SQD, row_SC, pos_SC)

        def spread(value_C: Tensor) -> Tensor:
            value_SC = value_C.view_as(pos_SC)
            out = torch.zeros(self.canvas.num_seats, capacity + 1, dtype=value_C.dtype, device=value_C.device)
            return out.scatter_(1, torch.where(scored_SC, slot_SC, capacity), value_SC)[:, :capacity]

        values = (stats.token_C, stats.prob_C, stats.margin_C, stats.neg_entropy_C)
        return Scores(spread(torch.ones_like(scored_SC).flatten()), *(spread(value) for value in values))

    def _decide(self, view: FrontierView, plan: FixedPlan, hidden_SQD: Tensor, scores: Scores) -> Tensor:
        """Commit what the drafter proved and what the rule chooses; [S] tokens that came from drafts."""
        canvas, params, drafter = self.canvas, self.params, self.drafter
        verdict = self._nested_verdict(drafter, plan, hidden_SQD, scores) if isinstance(drafter, Nested) else None
        if verdict is None:
            commit_SN = choose(canvas, view, scores, params)
            self._commit(commit_SN, scores.token_SN, scores.prob_SN)
            return self._verify(drafter, view, scores) if isinstance(drafter, TwoPass) else self.seat_S * 0
        left = FrontierView(view.candidate_SN & ~verdict.accepted_SN, view.rescue_group_SN, view.see_SN)
        commit_SN = choose(canvas, left, verdict.scores, params)
        self._commit(
            commit_SN | verdict.accepted_SN,
            torch.where(verdict.accepted_SN, verdict.token_SN, verdict.scores.token_SN),
            torch.where(verdict.accepted_SN, verdict.prob_SN, verdict.scores.prob_SN),
        )
        assert isinstance(drafter, Nested)
        drafter.propose(canvas, verdict.scores, view.candidate_SN)
        return verdict.accepted_SN.sum(1)

    def _commit(self, chosen_SN: Tensor, token_SN: Tensor, prob_SN: Tensor, *, new_pass: bool = True) -> None:
        stops = not (isinstance(self.frontier, Pipeline) and self.frontier.stop_adding_only)
        eos_SE = self.params.eos_SE if stops else torch.full_like(self.params.eos_SE, -1)
        self.canvas.commit(chosen_SN, token_SN, prob_SN, eos_SE, new_pass=new_pass)

    def _nested_verdict(self, drafter: Nested, plan: FixedPlan, hidden_SQD: Tensor, scores: Scores) -> Verdict:
        rows_SX = drafter.scored_rows(plan)
        stats = self._predict(hidden_SQD, rows_SX, plan.pos_SQ.gather(1, rows_SX))
        token_SX, prob_SX = (value.view_as(rows_SX) for value in (stats.token_C, stats.prob_C))
        return drafter.settle(self.canvas, scores, token_SX, prob_SX)

    def _verify(self, drafter: TwoPass, view: FrontierView, scores: Scores) -> Tensor:
        """Flash-Verify's second forward, and its commits."""
        search = drafter.search(self.canvas, scores, view.candidate_SN)
        plan = drafter.rows(self.canvas, search)
        hidden_SQD = self._forward(plan)
        first = drafter.num_context + drafter.num_search
        rows_SK = torch.arange(first, first + drafter.num_search, device=self.canvas.device).expand_as(search.pos_SK)
        stats = self._predict(hidden_SQD, rows_SK, search.pos_SK)
        token_SK, prob_SK = (value.view_as(rows_SK) for value in (stats.token_C, stats.prob_C))
        accepted_SN, token_SN, prob_SN = drafter.accept(self.canvas, search, token_SK, prob_SK, self.params)
        self._commit(accepted_SN, token_SN, prob_SN, new_pass=False)
        return accepted_SN.sum(1)

    def _tell(self, num_rows_S: Tensor, num_accepted_S: Tensor, overflow_S: Tensor) -> None:
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
            overflow_S,
            canvas.active_S,
        )
        self.readback.copy_(torch.stack([column.int() for column in columns], 1))
        canvas.active_S &= num_undecided_S > 0
