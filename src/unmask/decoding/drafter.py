"""What is tried ahead? Drafters add scratch rows, whose K/V no canvas row ever sees, and say what they proved.

S seats, N positions, Q canvas rows, Z pending drafts, B block positions, V = Z + 1 views, J live entries,
T context rows, K searched positions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.core.canvas import Canvas
from unmask.core.rows import FixedPlan, join, spread
from unmask.core.scores import Scores
from unmask.decoding.frontier import FrontierView
from unmask.decoding.params import DecodeParams
from unmask.decoding.rule import order, rank


def first_best(key: Tensor) -> Tensor:
    """Index of the largest entry along the last axis, the leftmost on ties on every device."""
    index = torch.arange(key.shape[-1], device=key.device)
    return torch.where(key == key.amax(-1, keepdim=True), index, key.shape[-1]).amin(-1).clamp(max=key.shape[-1] - 1)


@dataclass(frozen=True)
class Verdict:
    """What nested drafts proved, and what the rule goes on from: the columns are the block's positions."""

    accepted_SZ: Tensor
    """bool: drafts that stand, a run from the first."""
    prob_SZ: Tensor
    """Probability of each draft in the view before it."""
    view: FrontierView
    scores: Scores


class Nested:
    """FreeDave (arXiv 2510.00294): views of the current block with 1, 2, ... of the pending drafts filled in.

    All views run in one pass. Draft z + 1 is accepted when the view before it, on its own, would have committed just
    that token there; so the answer is that of one token a pass with the same cache. View 0 is the canvas itself.
    Expects one commit a pass and ranking by probability.
    """

    def __init__(self, num_drafts: int, block_width: int) -> None:
        self.num_drafts, self.block_width = num_drafts, block_width
        self.num_scratch = num_drafts * block_width

    def _block(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Positions of the current block [S, B], and which of them exist."""
        current_S1 = canvas.current_block_S()[:, None]
        inside_SN = canvas.visible_SN() & (canvas.block_SN == current_S1)
        start_S = torch.where(inside_SN, canvas.pos_1N(), canvas.capacity).amin(1)
        pos_SB = start_S[:, None] + torch.arange(self.block_width, device=start_S.device)
        exists_SB = (pos_SB < canvas.capacity) & inside_SN.gather(1, pos_SB.clamp(max=canvas.capacity - 1).long())
        return pos_SB.clamp(max=canvas.capacity - 1).long(), exists_SB

    def _views(self, canvas: Canvas, pos_SB: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of views 1.. [S, Z, B], and where a draft stands in them."""
        here_SZB = canvas.pending_pos_SZ[:, :, None] == pos_SB[:, None, :]
        token_SZB = torch.where(here_SZB, canvas.pending_token_SZ[:, :, None], 0).cumsum(1)
        placed_SZB = here_SZB.cumsum(1) > 0
        base_SB = canvas.token_SN.gather(1, pos_SB).long()
        return torch.where(placed_SZB, token_SZB, base_SB[:, None, :]), placed_SZB

    def rows(self, canvas: Canvas, plan: FixedPlan) -> FixedPlan:
        """The pass with the views' rows: they see the canvas without this block, and their own block."""
        pos_SB, exists_SB = self._block(canvas)
        token_SZB, _ = self._views(canvas, pos_SB)
        drafted_SZ = canvas.pending_pos_SZ >= 0
        valid_SZB = exists_SB[:, None, :] & drafted_SZ[:, :, None]
        num_seats, trash = len(pos_SB), canvas.capacity + self.num_scratch
        entry_X = canvas.capacity + torch.arange(self.num_scratch, device=pos_SB.device)
        valid_SX = valid_SZB.flatten(1)
        has_drafts_S1 = drafted_SZ.any(1, keepdim=True)
        return join(
            plan,
            FixedPlan(
                token_SQ=token_SZB.flatten(1).to(plan.token_SQ.dtype),
                pos_SQ=pos_SB.repeat(1, self.num_drafts),
                write_SQ=torch.where(valid_SX, entry_X, trash),
                see_SQ=torch.where(valid_SX, canvas.end_S[:, None], 0),
                valid_SQ=valid_SX,
                live_SJ=torch.cat((pos_SB, entry_X.expand(num_seats, -1)), 1),
                live_bits_SQJ=self._bits(plan, exists_SB & has_drafts_S1, valid_SZB),
                shadow_SN=(canvas.block_SN == canvas.current_block_S()[:, None]) & has_drafts_S1,
            ),
        )

    def _bits(self, plan: FixedPlan, base_SB: Tensor, valid_SZB: Tensor) -> Tensor:
        """Canvas rows hold the bits of the block's canvas entries, a view's rows those of the view."""
        num_seats, num_views, width = valid_SZB.shape
        own_ZZ = torch.eye(num_views, dtype=torch.bool, device=base_SB.device)
        views = own_ZZ[None, :, None, :, None] & valid_SZB[:, None, None, :, :]
        views = views.expand(-1, -1, width, -1, -1).reshape(num_seats, num_views * width, num_views * width)
        canvas = base_SB[:, None, :].expand(-1, plan.pos_SQ.shape[1], -1)
        off_canvas = views.new_zeros(num_seats, canvas.shape[1], num_views * width)
        off_views = views.new_zeros(num_seats, num_views * width, width)
        return torch.cat((torch.cat((canvas, off_canvas), 2), torch.cat((off_views, views), 2)), 1)

    def scored_rows(self, plan: FixedPlan) -> Tensor:
        """Rows of the pass that the views are scored from, [S, Z * B]."""
        first = plan.pos_SQ.shape[1] - self.num_scratch
        return torch.arange(first, plan.pos_SQ.shape[1], device=plan.pos_SQ.device).expand(len(plan.pos_SQ), -1)

    def settle(
        self,
        canvas: Canvas,
        view: FrontierView,
        token_SN: Tensor,
        prob_SN: Tensor,
        token_SX: Tensor,
        prob_SX: Tensor,
        params: DecodeParams,
    ) -> Verdict:
        """Accept the longest run of drafts; go on from the predictions of the last view that stands.

        ``token_SN``, ``prob_SN`` are view 0's predictions on the canvas, ``token_SX``, ``prob_SX`` the other views'.
        An end of text that is accepted ends the pass: the views after it still saw what lies behind it.
        """
        pos_SB, exists_SB = self._block(canvas)
        _, placed_SZB = self._views(canvas, pos_SB)
        token_SVB = torch.cat((token_SN.gather(1, pos_SB)[:, None], token_SX.view(placed_SZB.shape)), 1)
        prob_SVB = torch.cat((prob_SN.gather(1, pos_SB)[:, None], prob_SX.view(placed_SZB.shape)), 1)
        open_SB = exists_SB & view.candidate_SN.gather(1, pos_SB)
        open_SVB = torch.cat((open_SB[:, None], open_SB[:, None] & ~placed_SZB), 1)
        next_SV1 = first_best(prob_SVB.masked_fill(~open_SVB, -1))[..., None]
        next_pos_SZ = pos_SB[:, None, :].expand_as(token_SVB).gather(2, next_SV1)[:, :-1, 0]
        next_token_SZ = token_SVB.gather(2, next_SV1)[:, :-1, 0]
        agrees_SZ = (next_pos_SZ == canvas.pending_pos_SZ) & (next_token_SZ == canvas.pending_token_SZ)
        ends_SZ = (canvas.pending_token_SZ[:, :, None] == params.eos_SE[:, None, :]).any(2)
        ended_before_SZ = ends_SZ.cumsum(1) > ends_SZ.int()
        agrees_SZ = (~(agrees_SZ & open_SVB[:, :-1].any(2) & ~ended_before_SZ)).cumsum(1) == 0
        last_S1B = agrees_SZ.sum(1)[:, None, None].expand(-1, 1, self.block_width)
        open_SB, token_SB, prob_SB = (x.gather(1, last_S1B)[:, 0] for x in (open_SVB, token_SVB, prob_SVB))
        open_SB = open_SB & ~(agrees_SZ & ends_SZ).any(1, keepdim=True)
        group_SB = torch.where(open_SB, 0, -1)
        unused_SB = torch.zeros_like(prob_SB)
        return Verdict(
            agrees_SZ,
            prob_SVB.gather(2, next_SV1)[:, :-1, 0],
            FrontierView(open_SB, group_SB, view.see_SN),
            Scores(pos_SB, open_SB, token_SB, prob_SB, unused_SB, unused_SB),
        )

    def propose(self, canvas: Canvas, verdict: Verdict, commit_SB: Tensor) -> None:
        """Pending for the next pass: the most probable of what is still undecided in this block."""
        scores = verdict.scores
        open_SB = verdict.view.candidate_SN & ~commit_SB
        best_SZ = order(rank(scores.prob_SN.masked_fill(~open_SB, -1)), self.num_drafts)
        there_SZ = open_SB.gather(1, best_SZ)
        active_S1 = canvas.active_S[:, None]
        for pending_SZ, value_SB in (
            (canvas.pending_pos_SZ, scores.pos_SW),
            (canvas.pending_token_SZ, scores.token_SN),
        ):
            next_SZ = torch.where(there_SZ, value_SB.gather(1, best_SZ), -1)
            pending_SZ.copy_(torch.where(active_S1, next_SZ, pending_SZ))


@dataclass(frozen=True)
class Search:
    """Positions under verification, most confident first, and their drafts."""

    pos_SK: Tensor
    token_SK: Tensor
    valid_SK: Tensor


class TwoPass:
    """Flash-Verify (arXiv 2609.26796): a second pass looks at the next candidates with and without their drafts.

    Rows of the second pass: context (the latest decided positions), drafts, and MASK at the same positions; all
    write scratch. In ``strict`` isolation the MASK row of a position reads nothing that has seen its own draft: later
    searched positions come from the cache, as the first pass wrote them. The reference's isolation, live MASK rows
    throughout, leaks from the second layer on.
    """

    def __init__(self, *, num_context: int = 16, num_search: int = 8, strict: bool = True) -> None:
        self.num_context, self.num_search, self.strict = num_context, num_search, strict
        self.num_scratch = num_context + 2 * num_search

    def search(self, view: FrontierView, scores: Scores, commit_SW: Tensor) -> Search:
        """The most confident candidates that the rule left undecided."""
        open_SW = view.candidate_SN & scores.scored_SN & ~commit_SW
        best_SK = order(rank(scores.prob_SN.masked_fill(~open_SW, -1)), self.num_search)
        pos_SK, token_SK, valid_SK = (x.gather(1, best_SK) for x in (scores.pos_SW, scores.token_SN, open_SW))
        return Search(pos_SK, token_SK, valid_SK)

    def rows(self, canvas: Canvas, search: Search) -> FixedPlan:
        """The second pass."""
        context_ST, has_context_ST = self._context(canvas)
        busy_S1 = search.valid_SK.any(1, keepdim=True)
        valid_SQ = torch.cat((has_context_ST & busy_S1, search.valid_SK, search.valid_SK), 1)
        pos_SQ = torch.cat((context_ST, search.pos_SK, search.pos_SK), 1)
        mask_SK = torch.full_like(search.token_SK, canvas.mask_token_id)
        token_SQ = torch.cat((canvas.token_SN.gather(1, context_ST).long(), search.token_SK, mask_SK), 1)
        entry_Q = canvas.capacity + torch.arange(self.num_scratch, device=pos_SQ.device)
        live_valid_SJ = torch.cat((valid_SQ, search.valid_SK), 1)
        hidden_SN = spread(torch.ones_like(valid_SQ), pos_SQ, valid_SQ, canvas.capacity)
        return FixedPlan(
            token_SQ=token_SQ,
            pos_SQ=pos_SQ,
            write_SQ=torch.where(valid_SQ, entry_Q, canvas.capacity + self.num_scratch),
            see_SQ=torch.where(valid_SQ, canvas.end_S[:, None], 0),
            valid_SQ=valid_SQ,
            live_SJ=torch.cat((entry_Q.expand(len(pos_SQ), -1), search.pos_SK), 1),
            live_bits_SQJ=self._table(pos_SQ.device)[None] & live_valid_SJ[:, None, :],
            shadow_SN=hidden_SN,
        )

    def _context(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Latest commits first, then the rightmost of what was given; fewer if fewer are decided."""
        decided_SN = canvas.final_SN & canvas.visible_SN()
        key_SN = canvas.commit_pass_SN.long() * canvas.capacity + canvas.pos_1N()
        latest_ST = key_SN.masked_fill(~decided_SN, -1).topk(self.num_context, dim=1).indices  # no two keys are equal
        return latest_ST, decided_SN.gather(1, latest_ST)

    def _table(self, device: torch.device) -> Tensor:
        """Who sees which live entry: rows and columns [context | drafts | masks], and the cached masks as columns.

        Each row sees every searched position once: its draft if it comes earlier in order, a MASK otherwise.
        """
        num_context, K = self.num_context, self.num_search
        order_K = torch.arange(K, device=device)
        earlier_KK, later_KK = order_K[:, None] > order_K, order_K[:, None] < order_K
        none_KK, self_KK = torch.zeros_like(earlier_KK), order_K[:, None] == order_K
        all_TK = torch.ones(num_context, K, dtype=torch.bool, device=device)
        live_later_KK, cached_later_KK = (none_KK, later_KK) if self.strict else (later_KK, none_KK)
        live_TK, cached_TK = (~all_TK, all_TK) if self.strict else (all_TK, ~all_TK)
        context = torch.cat((all_TK.new_ones(num_context, num_context), ~all_TK, live_TK, cached_TK), 1)
        sees_context = all_TK.new_ones(K, num_context)
        drafts = torch.cat((sees_context, earlier_KK | self_KK, live_later_KK, cached_later_KK), 1)
        masks = torch.cat((sees_context, earlier_KK, live_later_KK | self_KK, cached_later_KK), 1)
        return torch.cat((context, drafts, masks))

    def accept(self, search: Search, token_SK: Tensor, prob_SK: Tensor, params: DecodeParams) -> Tensor:
        """bool [S, K]: the longest run that the MASK rows agree with, each at least as sure as gamma."""
        agrees_SK = search.valid_SK & (token_SK == search.token_SK) & (prob_SK >= params.gamma_S[:, None])
        return (~agrees_SK).cumsum(1) == 0
