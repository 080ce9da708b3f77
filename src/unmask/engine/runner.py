"""Executes a pass: the only caller of the model.

S seats, N positions, M rows, C scored positions, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan
from unmask.core.scores import Scores
from unmask.decoding.params import DecodeParams
from unmask.engine.scoring import Model, banned_ids, guide, predict
from unmask.engine.stats import Stats
from unmask.models.attention import PackedContext


@dataclass(frozen=True)
class _Wanted:
    """The candidates of a pass that a row can answer."""

    seat_C: Tensor
    pos_C: Tensor
    row_C: Tensor
    source_C: Tensor
    """Position whose row scores the candidate."""


class Runner:
    """Runs row plans and scores candidates. ``unknown_ids`` are ids that the tokenizer does not know."""

    def __init__(self, model: Model, unknown_ids: list[int], stats: Stats) -> None:
        self.model, self.stats = model, stats
        self.shift = model.config.logit_shift
        self._banned_b = banned_ids(model, unknown_ids)

    def forward(self, plan: RowPlan, candidate_SN: Tensor, canvas: Canvas, params: DecodeParams) -> Scores:
        """One pass, and the scores of its candidates."""
        with self.stats.time("forward"):
            hidden_MD = self._run(plan)
        with self.stats.time("scores"):
            return self._score(hidden_MD, plan, candidate_SN, canvas, params)

    def _run(self, plan: RowPlan) -> Tensor:
        ctx = PackedContext(
            plan.pos_M, plan.seat_M, plan.pos_M, len(plan.see_S), plan.width, plan.see_S, self.model.rope
        )
        return self.model(plan.token_M, ctx)

    def _score(
        self, hidden_MD: Tensor, plan: RowPlan, candidate_SN: Tensor, canvas: Canvas, params: DecodeParams
    ) -> Scores:
        wanted = self._wanted(plan, candidate_SN)
        hidden_CD = hidden_MD[wanted.row_C]
        if params.needs.guided:
            hidden_CD = _guided(hidden_CD, hidden_MD, plan, wanted, params)
        stats = predict(hidden_CD, self.model.head, self._banned_b, wanted.seat_C, wanted.pos_C, canvas, params)
        scores = Scores.empty(canvas.num_seats, canvas.capacity, canvas.device)
        at = (wanted.seat_C, wanted.pos_C)
        scores.scored_SN[at] = True
        for into, values in (
            (scores.token_SN, stats.token_C),
            (scores.prob_SN, stats.prob_C),
            (scores.margin_SN, stats.margin_C),
            (scores.neg_entropy_SN, stats.neg_entropy_C),
        ):
            into[at] = values
        return scores

    def _wanted(self, plan: RowPlan, candidate_SN: Tensor) -> _Wanted:
        """Position p is scored from row p - shift (row 0 for position 0), if that row ran."""
        seat_C, pos_C = candidate_SN.nonzero(as_tuple=True)
        source_C = (pos_C - self.shift).clamp(min=0)
        row_C = plan.row_SN[seat_C, source_C]
        ran_C = row_C >= 0
        return _Wanted(seat_C[ran_C], pos_C[ran_C], row_C[ran_C], source_C[ran_C])


def _guided(hidden_CD: Tensor, hidden_MD: Tensor, plan: RowPlan, wanted: _Wanted, params: DecodeParams) -> Tensor:
    """Rows of guided seats mixed with their twins'."""
    twin_C = params.twin_S[wanted.seat_C]
    twin_row_C = plan.row_SN[torch.where(twin_C >= 0, twin_C, wanted.seat_C), wanted.source_C]
    return guide(hidden_CD, hidden_MD[twin_row_C], params.guidance_S[wanted.seat_C], twin_C >= 0)
