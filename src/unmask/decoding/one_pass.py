"""One-pass verification: every pass checks the drafts of the pass before it, beside its own work.

S seats, N positions, W columns of the rule, Z drafts and as many views, V = Z - 1 views that need rows of their own,
X = 2V scratch columns, J = Z + X live columns

View i is the canvas with the first i - 1 drafts in place and MASK at every other undecided position. The canvas itself
is view 1, so its row that scores the first draft's position judges that draft. Every later view has two scratch rows:
the evidence, which is the draft before it, and the probe, which judges the view's own draft: its row at that draft's
position, a MASK, or where logits are shifted the one before it, whatever the view has there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.core.canvas import Canvas, put
from unmask.core.rows import Scratch, spread
from unmask.core.scores import Scores
from unmask.decoding.drafter import Drafter, Prediction, Turn, commit_canvas, on_canvas
from unmask.decoding.frontier import FrontierView
from unmask.decoding.params import DecodeParams
from unmask.decoding.rule import choose, order, rank
from unmask.errors import ConfigError

MAX_DRAFTS = 22  # 3Z - 2 live entries: the drafts' places on the canvas, evidence, probes; a live list holds 64


@dataclass(frozen=True)
class Judged:
    """What became of the drafts."""

    accepted_SZ: Tensor
    """bool: a run from the first draft, without what its own end of text removed."""
    prob_SZ: Tensor
    """Probability of each in its view, if it is what the view predicts."""
    rejected_pos_S1: Tensor
    """Position of the first draft that its view refused; -1 if there is none."""
    rejected_token_S1: Tensor
    """What the view predicts there instead."""
    end_S1: Tensor
    """Where the canvas ends with the accepted ones."""


class OnePass(Drafter):
    """Drafts are the most probable candidates that a pass leaves undecided; the next pass verifies them.

    No row reads a draft that it judges, not even through another row: canvas rows see canvas entries only; evidence j
    sees evidence 1..j, probe i evidence 1..i-1, both at the places of these drafts, and the canvas everywhere else; but
    a row that stands at a draft's place sees itself there and nothing else. Accepted is the longest run of drafts that
    their views predict, each with at least gamma or all of them with a product of at least gamma. Then the rule decides
    from the canvas rows; it rescues nobody where a draft was accepted. Expects rows that see the whole canvas.

    A request has at most ``search`` drafts; with one, no row is added. ``shift`` is the network's logit shift.
    """

    parts = ("judge",)

    def __init__(self, num_drafts: int = 8, *, shift: int = 0) -> None:
        if not 1 <= num_drafts <= MAX_DRAFTS:
            raise ConfigError(f"{num_drafts} drafts cannot be verified in one pass; use 1 to {MAX_DRAFTS}")
        self.num_pending, self.shift = num_drafts, shift
        self.num_scratch = 2 * (num_drafts - 1)

    # --- before the forward

    def scratch(self, canvas: Canvas) -> Scratch | None:
        """Evidence rows, then probe rows."""
        if not self.num_scratch:
            return None
        there_SZ, pos_SZ = self._pending(canvas)
        evidence_SV, has_view_SV = canvas.pending_token_SZ[:, :-1], there_SZ[:, 1:]
        probe_pos_SV, probe_SV = self._probes(canvas, pos_SZ)
        pos_SX = torch.cat((pos_SZ[:, :-1], probe_pos_SV), 1)
        column_X = canvas.capacity + torch.arange(self.num_scratch, device=pos_SZ.device)
        valid_SX = torch.cat((has_view_SV, has_view_SV), 1)
        sees_SXJ = self._table(pos_SZ.device) & torch.cat((there_SZ, valid_SX), 1)[:, None, :]
        return Scratch(
            token_SX=torch.cat((evidence_SV, probe_SV), 1),
            pos_SX=pos_SX,
            valid_SX=valid_SX,
            live_SJ=torch.cat((pos_SZ, column_X.expand(len(pos_SZ), -1)), 1),
            canvas_bits_SJ=torch.cat((there_SZ, torch.zeros_like(valid_SX)), 1),
            bits_SXJ=self._standing(there_SZ, pos_SZ, pos_SX, sees_SXJ) if self.shift else sees_SXJ,
            shadow_SN=spread(there_SZ, pos_SZ, there_SZ, canvas.capacity),
        )

    def _pending(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Which drafts this pass verifies, and where. Those of a seat that stands still wait."""
        there_SZ = (canvas.pending_pos_SZ >= 0) & canvas.active_S[:, None]
        return there_SZ, canvas.pending_pos_SZ.clamp(min=0)

    def _probes(self, canvas: Canvas, pos_SZ: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and tokens [S, V] of the rows that score the later drafts, each as its own view has it."""
        pos_SV = pos_SZ[:, 1:]
        if not self.shift:
            return pos_SV, torch.full_like(pos_SV, canvas.mask_token_id)
        pos_SV = (pos_SV - self.shift).clamp(min=0)
        placed_SVV = (pos_SV[:, :, None] == pos_SZ[:, None, :-1]).tril()  # an earlier draft stands there
        draft_SV = torch.where(placed_SVV, canvas.pending_token_SZ[:, None, :-1], 0).sum(2)
        return pos_SV, torch.where(placed_SVV.any(2), draft_SV, canvas.token_SN.gather(1, pos_SV))

    def _standing(self, there_SZ: Tensor, pos_SZ: Tensor, pos_SX: Tensor, sees_SXJ: Tensor) -> Tensor:
        """The same for rows that stand anywhere. At a draft's place they see themselves; elsewhere the canvas, which
        has the same token: were a decided position live, it would lose its tracking mass, which is the sweep's."""
        here_SXJ = pos_SX[:, :, None] == torch.cat((pos_SZ, pos_SX), 1)[:, None, :]
        stands_SX1 = (here_SXJ[:, :, : self.num_pending] & there_SZ[:, None, :]).any(2, keepdim=True)
        itself_XX = torch.eye(self.num_scratch, dtype=torch.bool, device=pos_SX.device)
        itself_XJ = torch.nn.functional.pad(itself_XX, (self.num_pending, 0))
        return torch.where(here_SXJ, itself_XJ & stands_SX1, sees_SXJ)

    def _table(self, device: torch.device) -> Tensor:
        """Who sees which live entry: rows [evidence | probes], columns [canvas at the drafts' places | the rows]."""
        place_Z = torch.arange(self.num_pending, device=device)
        row_V1, column_V = place_Z[:-1, None], place_Z[:-1]
        before_VV, self_VV = column_V <= row_V1, column_V == row_V1
        own = 0 if self.shift else 1  # a probe stands at its draft's place, or sees a MASK there
        evidence = torch.cat((place_Z > row_V1, before_VV, torch.zeros_like(self_VV)), 1)
        probes = torch.cat((place_Z > row_V1 + own, before_VV, self_VV), 1)
        return torch.cat((evidence, probes))

    # --- after it

    def settle(self, turn: Turn) -> Tensor:
        drafted = turn.drafted() if self.num_scratch else None
        return self.judge(turn.canvas, turn.params, turn.view, turn.scores, drafted)

    def judge(
        self, canvas: Canvas, params: DecodeParams, view: FrontierView, scores: Scores, drafted: Prediction | None
    ) -> Tensor:
        """Drafts that stand, the rule on what they leave, and the next drafts; how many were accepted."""
        judged = self._judged(canvas, params, view, scores, drafted)
        left = self._left(canvas, view, scores, judged)
        chosen_SW = choose(canvas, left, scores, params)
        chosen = on_canvas(canvas, scores.pos_SW, chosen_SW, scores.token_SN, scores.prob_SN)
        _, pos_SZ = self._pending(canvas)
        proved = on_canvas(canvas, pos_SZ, judged.accepted_SZ, canvas.pending_token_SZ, judged.prob_SZ)
        commit_canvas(canvas, params, *(torch.where(proved[0], b, a) for a, b in zip(chosen, proved)))
        num_accepted_S = (judged.accepted_SZ & (pos_SZ < canvas.end_S[:, None])).sum(1)
        open_SW = left.candidate_SN & scores.scored_SN & ~chosen_SW & (scores.pos_SW < canvas.end_S[:, None])
        self._propose(canvas, params, scores, open_SW, judged)
        return num_accepted_S

    def _judged(
        self, canvas: Canvas, params: DecodeParams, view: FrontierView, scores: Scores, drafted: Prediction | None
    ) -> Judged:
        there_SZ, pos_SZ = self._pending(canvas)
        first_SW = (scores.pos_SW == pos_SZ[:, :1]) & there_SZ[:, :1] & view.candidate_SN & scores.scored_SN
        token_SZ, prob_SZ = (
            torch.where(first_SW, value_SW, 0).sum(1, keepdim=True) for value_SW in (scores.token_SN, scores.prob_SN)
        )
        if drafted is not None:
            probes = slice(self.num_scratch // 2, None)
            token_SZ = torch.cat((token_SZ, drafted.token_SW[:, probes]), 1)
            prob_SZ = torch.cat((prob_SZ, drafted.prob_SW[:, probes]), 1)
        judged_SZ = torch.cat((first_SW.any(1, keepdim=True), there_SZ[:, 1:]), 1)
        agrees_SZ = judged_SZ & (token_SZ == canvas.pending_token_SZ)
        product_SZ = torch.where(agrees_SZ, prob_SZ, 0).cumprod(1)
        sure_SZ = torch.where(params.product_S[:, None], product_SZ, prob_SZ) >= params.gamma_S[:, None]
        num_refused_SZ = (~(agrees_SZ & sure_SZ)).cumsum(1)
        run_SZ, rejected_SZ = num_refused_SZ == 0, judged_SZ & (num_refused_SZ == 1) & ~(agrees_SZ & sure_SZ)
        ends_SZ = run_SZ & (canvas.pending_token_SZ[:, :, None] == params.stops_SE[:, None, :]).any(2)
        end_S1 = torch.where(ends_SZ, pos_SZ + 1, canvas.end_S[:, None]).amin(1, keepdim=True)
        return Judged(
            run_SZ & (pos_SZ < end_S1),
            prob_SZ,
            torch.where(rejected_SZ, pos_SZ, -1).amax(1, keepdim=True),
            torch.where(rejected_SZ, token_SZ, -1).amax(1, keepdim=True),
            end_S1,
        )

    def _left(self, canvas: Canvas, view: FrontierView, scores: Scores, judged: Judged) -> FrontierView:
        """What the rule may still decide."""
        accepted_pos_SZ1 = torch.where(judged.accepted_SZ, canvas.pending_pos_SZ, -1)[:, :, None]
        taken_SW = (scores.pos_SW[:, None, :] == accepted_pos_SZ1).any(1)
        group_SW = view.rescue_group_SN.masked_fill(judged.accepted_SZ.any(1, keepdim=True), -1)
        candidate_SW = view.candidate_SN & ~taken_SW & (scores.pos_SW < judged.end_S1)
        return replace(view, candidate_SN=candidate_SW, rescue_group_SN=group_SW)

    def _propose(self, canvas: Canvas, params: DecodeParams, scores: Scores, open_SW: Tensor, judged: Judged) -> None:
        """Drafts for the next pass: the most probable on the canvas of what is still open. Where a draft was refused
        first, its view knows more than the canvas: that one's token."""
        best_SZ = order(rank(scores.neg_doubt_SN.masked_fill(~open_SW, -torch.inf)), self.num_pending)
        place_Z = torch.arange(best_SZ.shape[1], device=best_SZ.device)
        there_SZ = open_SW.gather(1, best_SZ) & (place_Z < params.search_S[:, None])
        pos_SZ = scores.pos_SW.expand_as(scores.token_SN).gather(1, best_SZ)
        token_SZ = scores.token_SN.gather(1, best_SZ)
        token_SZ = torch.where(pos_SZ == judged.rejected_pos_S1, judged.rejected_token_S1, token_SZ)
        missing = (0, self.num_pending - best_SZ.shape[1])  # fewer columns than drafts
        active_S1 = canvas.active_S[:, None]
        for pending_SZ, value_SZ in ((canvas.pending_pos_SZ, pos_SZ), (canvas.pending_token_SZ, token_SZ)):
            next_SZ = torch.nn.functional.pad(torch.where(there_SZ, value_SZ, -1), missing, value=-1)
            put(pending_SZ, active_S1, next_SZ)
