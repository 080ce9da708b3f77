"""What is tried ahead? Drafters add scratch rows, whose K/V no canvas row ever sees, and say what they proved.

S seats, N positions, W columns of the rule, X scratch columns, Z pending drafts, B block positions, V = Z + 1 views,
T context rows, K searched positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from unmask.core.canvas import Canvas, put
from unmask.core.rows import Scratch, spread
from unmask.core.scores import Scores
from unmask.decoding.frontier import FrontierView
from unmask.decoding.params import DecodeParams
from unmask.decoding.rule import choose, order, rank
from unmask.errors import ConfigError


def first_best(key: Tensor) -> Tensor:
    """Index of the largest entry along the last axis, the leftmost on ties on every device."""
    index = torch.arange(key.shape[-1], device=key.device)
    return torch.where(key == key.amax(-1, keepdim=True), index, key.shape[-1]).amin(-1).clamp(max=key.shape[-1] - 1)


@dataclass(frozen=True)
class Prediction:
    """Of some rows: the token each would commit, and its probability."""

    token_SW: Tensor
    prob_SW: Tensor
    neg_doubt_SW: Tensor
    """As that of `Scores`."""
    asked_prob_SW: Tensor
    """Probability of the token that was asked about; zeros if none was."""


class Turn(Protocol):
    """A pass that has run, as a drafter sees it. The columns of ``view`` are those of ``scores``."""

    @property
    def canvas(self) -> Canvas: ...
    @property
    def params(self) -> DecodeParams: ...
    @property
    def view(self) -> FrontierView: ...
    @property
    def scores(self) -> Scores: ...

    def drafted(self) -> Prediction:
        """Predictions of this pass's scratch rows, all X of them."""
        ...

    def again(self, scratch: Scratch, first: int, pos_SK: Tensor, ask_SK: Tensor) -> Prediction:
        """A second pass over scratch rows alone; predictions of the K of them from column ``first`` on."""
        ...


class Drafter:
    """One member of the axis; this one tries nothing ahead, so a pass ends with the rule."""

    num_scratch = 0
    """Scratch entries that a seat needs."""
    num_second = 0
    """Rows of a second pass; 0: there is none."""
    num_pending = 0
    """Drafts that wait for the next pass."""
    parts: tuple[str, ...] = ("rule",)
    """Methods without a forward inside: what a compiled step fuses."""
    static = True
    """Its passes have a fixed shape and can be captured; without, every pass is ragged."""
    shift = 0
    """Logit shift of the networks that its scratch rows are laid out for."""

    def scratch(self, canvas: Canvas) -> Scratch | None:  # noqa: ARG002
        """Rows that go beside the canvas rows of a pass."""
        return None

    def settle(self, turn: Turn) -> Tensor:
        """Commit what this step decides; int64 [S]: how many drafts were accepted."""
        self.rule(turn.canvas, turn.params, turn.view, turn.scores)
        return torch.zeros_like(turn.canvas.rows_S)

    def rule(self, canvas: Canvas, params: DecodeParams, view: FrontierView, scores: Scores) -> Tensor:
        """The rule and its commits; bool [S, W], what it chose."""
        chosen_SW = choose(canvas, view, scores, params)
        commit(canvas, params, scores.pos_SW, chosen_SW, scores.token_SN, scores.prob_SN)
        return chosen_SW


def on_canvas(canvas: Canvas, pos_SW: Tensor, chosen_SW: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Chosen columns as bool [S, N], and their values."""
    return tuple(spread(value, pos_SW, chosen_SW, canvas.capacity) for value in (chosen_SW, *values))


def commit(
    canvas: Canvas,
    params: DecodeParams,
    pos_SW: Tensor,
    chosen_SW: Tensor,
    token_SW: Tensor,
    prob_SW: Tensor,
    *,
    new_step: bool = True,
) -> None:
    """Make the chosen columns final. Seats that drain do not end at an end of text."""
    chosen_SN, token_SN, prob_SN = on_canvas(canvas, pos_SW, chosen_SW, token_SW, prob_SW)
    commit_canvas(canvas, params, chosen_SN, token_SN, prob_SN, new_step=new_step)


def commit_canvas(
    canvas: Canvas, params: DecodeParams, chosen_SN: Tensor, token_SN: Tensor, prob_SN: Tensor, *, new_step: bool = True
) -> None:
    """The same by position."""
    canvas.commit(chosen_SN, token_SN, prob_SN, params.stops_SE, new_pass=new_step)
    if params.needs.guided:
        canvas.follow()


@dataclass(frozen=True)
class Verdict:
    """What nested drafts proved, and what the rule goes on from: the columns are the block's positions."""

    accepted_SZ: Tensor
    """bool: drafts that stand, a run from the first."""
    prob_SZ: Tensor
    """Probability of each draft in the view before it."""
    view: FrontierView
    scores: Scores


class Nested(Drafter):
    """FreeDave (arXiv 2510.00294): views of the current block with 1, 2, ... of the pending drafts filled in.

    All views run in one pass. A view that stands, on its own, would have committed just the drafts up to a later one:
    then that one stands, too. So the answer is that of the threshold rule without drafts over the same cache; of one
    token a pass where no probability reaches the threshold. View 0 is the canvas itself. Expects ranking by
    probability, and of a schedule one commit a pass.

    ``block_width`` is the most positions of a view: a block, or with ``ahead`` all from a block's first position to the
    canvas's end, which Fast-dLLM's prefix cache recomputes with the block. Such views are too many for a captured pass.
    ``shift`` is the network's logit shift. Then the first pass over a block commits its first position alone and
    proposes of the others; the frontier need not hold these back.
    """

    parts = ("judge",)

    def __init__(self, num_drafts: int, block_width: int, *, ahead: bool = False, shift: int = 0) -> None:
        if num_drafts > block_width:
            raise ConfigError(f"{num_drafts} nested drafts do not fit a block of {block_width}; use fewer")
        self.num_drafts, self.block_width, self.ahead, self.shift = num_drafts, block_width, ahead, shift
        self.num_pending, self.num_scratch = num_drafts, num_drafts * block_width
        self.static = not ahead

    def _inside(self, canvas: Canvas) -> Tensor:
        """bool [S, N]: positions of which every view has rows of its own."""
        current_S1 = canvas.current_block_S()[:, None]
        return canvas.block_SN >= current_S1 if self.ahead else canvas.block_SN == current_S1

    def _block(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Positions of a view [S, B], and which of them exist."""
        inside_SN = canvas.visible_SN() & self._inside(canvas)
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

    def scratch(self, canvas: Canvas) -> Scratch:
        """The views' rows: they see the canvas without the positions of a view, and their own view."""
        pos_SB, exists_SB = self._block(canvas)
        token_SZB, _ = self._views(canvas, pos_SB)
        drafted_SZ = canvas.pending_pos_SZ >= 0
        valid_SZB = exists_SB[:, None, :] & drafted_SZ[:, :, None]
        column_X = canvas.capacity + torch.arange(self.num_scratch, device=pos_SB.device)
        has_drafts_S1 = drafted_SZ.any(1, keepdim=True)
        return Scratch(
            token_SX=token_SZB.flatten(1),
            pos_SX=pos_SB.repeat(1, self.num_drafts),
            valid_SX=valid_SZB.flatten(1),
            live_SJ=torch.cat((pos_SB, column_X.expand(len(pos_SB), -1)), 1),
            canvas_bits_SJ=torch.cat((exists_SB & has_drafts_S1, torch.zeros_like(valid_SZB.flatten(1))), 1),
            bits_SXJ=self._bits(valid_SZB),
            shadow_SN=self._inside(canvas) & has_drafts_S1,
        )

    def _bits(self, valid_SZB: Tensor) -> Tensor:
        """A view's rows hold the bits of that view, and none of the canvas entries at its positions."""
        num_seats, num_views, width = valid_SZB.shape
        own_ZZ = torch.eye(num_views, dtype=torch.bool, device=valid_SZB.device)
        views = own_ZZ[None, :, None, :, None] & valid_SZB[:, None, None, :, :]
        views = views.expand(-1, -1, width, -1, -1).reshape(num_seats, num_views * width, num_views * width)
        return torch.cat((views.new_zeros(num_seats, num_views * width, width), views), 2)

    def settle(self, turn: Turn) -> Tensor:
        drafted = turn.drafted()
        return self.judge(turn.canvas, turn.params, turn.view, turn.scores, drafted)

    def judge(
        self, canvas: Canvas, params: DecodeParams, view: FrontierView, scores: Scores, drafted: Prediction
    ) -> Tensor:
        """Drafts that stand, the rule on the last view that does, and the next drafts; how many were accepted."""
        pos_SW, there_SW = scores.pos_SW, scores.scored_SN & view.candidate_SN
        columns = (scores.token_SN, scores.prob_SN, scores.neg_doubt_SN)
        open_SN, *first = on_canvas(canvas, pos_SW, there_SW, *columns)
        more = (drafted.token_SW, drafted.prob_SW, drafted.neg_doubt_SW)
        verdict = self.verdict(canvas, open_SN, first, more, params, view.see_SN)
        best = verdict.scores
        chosen_SB = choose(canvas, self._leading(verdict.view), best, params)
        chosen = on_canvas(canvas, best.pos_SW, chosen_SB, best.token_SN, best.prob_SN)
        pending = (canvas.pending_pos_SZ.clamp(min=0), verdict.accepted_SZ, canvas.pending_token_SZ, verdict.prob_SZ)
        proved = on_canvas(canvas, *pending)
        commit_canvas(canvas, params, *(torch.where(proved[0], b, a) for a, b in zip(chosen, proved)))
        self.propose(canvas, verdict, chosen_SB)
        return verdict.accepted_SZ.sum(1)

    def _leading(self, view: FrontierView) -> FrontierView:
        """What the rule may decide: under shifted logits the block's first position, while it is open, and no other."""
        if not self.shift:
            return view
        open_SB = view.candidate_SN
        first_B = torch.arange(self.block_width, device=open_SB.device) == 0
        return replace(view, candidate_SN=open_SB & (first_B | ~open_SB[:, :1]))

    def _by_position(self, more_SX: Tensor) -> Tensor:
        """What the views' rows say, [S, Z, B], by the position that each scores; nobody scores a view's first ones
        under shifted logits, and there they are decided."""
        row_SZB = more_SX.view(len(more_SX), self.num_drafts, self.block_width)
        return torch.nn.functional.pad(row_SZB, (self.shift, 0))[:, :, : self.block_width] if self.shift else row_SZB

    def verdict(
        self,
        canvas: Canvas,
        open_SN: Tensor,
        first: Sequence[Tensor],
        more: Sequence[Tensor],
        params: DecodeParams,
        see_SN: Tensor,
    ) -> Verdict:
        """Accept drafts from one view that stands to the next; go on from the predictions of the last one.

        ``first`` [S, N] are tokens, probabilities and negative doubts of view 0, the canvas; ``more`` [S, X] those of
        the other views.
        An end of text that is accepted ends the pass: the views after it still saw what lies behind it.
        """
        pos_SB, exists_SB = self._block(canvas)
        _, placed_SZB = self._views(canvas, pos_SB)
        token_SVB, prob_SVB, neg_doubt_SVB = (
            torch.cat((value_SN.gather(1, pos_SB)[:, None], self._by_position(value_SX)), 1)
            for value_SN, value_SX in zip(first, more)
        )
        open_SB = exists_SB & open_SN.gather(1, pos_SB)
        open_SVB = torch.cat((open_SB[:, None], open_SB[:, None] & ~placed_SZB), 1)
        takes_SVB = self._takes(open_SVB, prob_SVB, neg_doubt_SVB, params)
        ends_SZ = (canvas.pending_token_SZ[:, :, None] == params.eos_SE[:, None, :]).any(2)
        last_S, prob_SZ = self._walk(canvas, pos_SB, takes_SVB, token_SVB, prob_SVB, ends_SZ)
        place_Z = torch.arange(self.num_drafts, device=last_S.device)
        accepted_SZ = place_Z < last_S[:, None]
        last_S1B = last_S[:, None, None].expand(-1, 1, self.block_width)
        views = (open_SVB, token_SVB, prob_SVB, neg_doubt_SVB)
        open_SB, token_SB, prob_SB, neg_doubt_SB = (x.gather(1, last_S1B)[:, 0] for x in views)
        open_SB = open_SB & ~(accepted_SZ & ends_SZ).any(1, keepdim=True)
        group_SB = torch.where(open_SB, 0, -1)
        unused_SB = torch.zeros_like(prob_SB)
        return Verdict(
            accepted_SZ,
            prob_SZ,
            FrontierView(open_SB, group_SB, see_SN),
            Scores(pos_SB, open_SB, token_SB, prob_SB, neg_doubt_SB, unused_SB, unused_SB),
        )

    def _takes(self, open_SVB: Tensor, prob_SVB: Tensor, neg_doubt_SVB: Tensor, params: DecodeParams) -> Tensor:
        """bool [S, V, B]: what the rule would commit in each view, all at the threshold, else the best; that one alone
        where a schedule caps it."""
        threshold_S11, strict_S11 = params.threshold_S[:, None, None], params.strict_S[:, None, None]
        sure_SVB = torch.where(strict_S11, prob_SVB > threshold_S11, prob_SVB >= threshold_S11)
        sure_SVB = sure_SVB & open_SVB & ~params.capped_S[:, None, None]
        best_SV1 = first_best(neg_doubt_SVB.masked_fill(~open_SVB, -torch.inf))[..., None]
        best_SVB = torch.zeros_like(open_SVB).scatter_(2, best_SV1, True) & open_SVB
        return torch.where(sure_SVB.any(2, keepdim=True), sure_SVB, best_SVB)

    def _walk(
        self,
        canvas: Canvas,
        pos_SB: Tensor,
        takes_SVB: Tensor,
        token_SVB: Tensor,
        prob_SVB: Tensor,
        ends_SZ: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The last view that stands [S], and each draft's probability in the view that took it.

        A view that takes n tokens leads to the one n further if these are the next n drafts, all of them: the ones
        between are no canvas that the rule alone would come to.
        """
        column_S1Z = (canvas.pending_pos_SZ - pos_SB[:, :1]).clamp(0, self.block_width - 1)[:, None]
        column_SVZ = column_S1Z.expand(-1, self.num_drafts, -1)
        taken_SVZ, token_SVZ, prob_SVZ = (
            value[:, :-1].gather(2, column_SVZ) for value in (takes_SVB, token_SVB, prob_SVB)
        )
        there_S1Z = (canvas.pending_pos_SZ >= 0)[:, None]
        agrees_SVZ = there_S1Z & taken_SVZ & (token_SVZ == canvas.pending_token_SZ[:, None])
        num_taken_SV = takes_SVB[:, :-1].sum(2)
        place_Z = torch.arange(self.num_drafts, device=pos_SB.device)
        last_S = torch.zeros_like(canvas.pending_pos_SZ[:, 0])
        prob_SZ = torch.zeros_like(prob_SVZ[:, 0])
        ended_S = torch.zeros_like(ends_SZ[:, 0])
        for view in range(self.num_drafts):
            next_S = view + num_taken_SV[:, view]
            next_SZ = (place_Z >= view) & (place_Z < next_S[:, None])
            known_S = (next_SZ & agrees_SVZ[:, view]).sum(1) == num_taken_SV[:, view]
            goes_S = (last_S == view) & known_S & (num_taken_SV[:, view] > 0) & ~ended_S
            next_SZ = next_SZ & goes_S[:, None]
            prob_SZ = torch.where(next_SZ, prob_SVZ[:, view], prob_SZ)
            ended_S = ended_S | (next_SZ & ends_SZ).any(1)
            last_S = torch.where(goes_S, next_S, last_S)
        return last_S, prob_SZ

    def propose(self, canvas: Canvas, verdict: Verdict, commit_SB: Tensor) -> None:
        """Pending for the next pass: the most probable of what is still undecided in this block."""
        scores = verdict.scores
        open_SB = verdict.view.candidate_SN & ~commit_SB
        best_SZ = order(rank(scores.neg_doubt_SN.masked_fill(~open_SB, -torch.inf)), self.num_drafts)
        there_SZ = open_SB.gather(1, best_SZ)
        active_S1 = canvas.active_S[:, None]
        for pending_SZ, value_SB in (
            (canvas.pending_pos_SZ, scores.pos_SW),
            (canvas.pending_token_SZ, scores.token_SN),
        ):
            next_SZ = torch.where(there_SZ, value_SB.gather(1, best_SZ), -1)
            put(pending_SZ, active_S1, next_SZ)


@dataclass(frozen=True)
class Search:
    """Positions under verification, most confident first, and their drafts."""

    pos_SK: Tensor
    token_SK: Tensor
    valid_SK: Tensor


class TwoPass(Drafter):
    """Flash-Verify (arXiv 2609.26796 section 3.2): a second pass looks at the next candidates with and without drafts.

    Rows of the second pass: decided context, drafts, and MASK at the same positions; all write scratch. In strict
    isolation the MASK row of a position reads nothing that has seen its own draft: later searched positions come from
    the cache, as the first pass wrote them. The reference's isolation, live MASK rows throughout, leaks from the second
    layer on. ``num_rows`` is the most rows of the second pass: two a searched position, the rest context.
    """

    parts = ("draft", "accept")

    def __init__(self, *, num_rows: int = 32, num_search: int = 8) -> None:
        self.num_rows, self.num_search = num_rows, num_search
        self.num_context = max(num_rows - 2, 0)  # with one position searched, the least
        self.num_scratch = self.num_context + 2 * num_search
        self.num_second = max(num_rows, 2 * num_search)
        self._kept: tuple[Tensor, Tensor] | None = None

    def settle(self, turn: Turn) -> Tensor:
        self._tables(turn.canvas.device)  # before `draft`, which may be compiled
        search, scratch = self.draft(turn.canvas, turn.params, turn.view, turn.scores)
        first = self.num_context + self.num_search
        seen = turn.again(scratch, first, search.pos_SK, search.token_SK)
        return self.accept(turn.canvas, turn.params, search, seen)

    def draft(self, canvas: Canvas, params: DecodeParams, view: FrontierView, scores: Scores) -> tuple[Search, Scratch]:
        """The rule's commits, then the most confident of what it left, and the second pass over them."""
        chosen_SW = self.rule(canvas, params, view, scores)
        search = self._search(canvas, params, view, scores, chosen_SW)
        return search, self._rows(canvas, params, search)

    def _search(
        self, canvas: Canvas, params: DecodeParams, view: FrontierView, scores: Scores, chosen_SW: Tensor
    ) -> Search:
        open_SW = view.candidate_SN & scores.scored_SN & ~chosen_SW & (scores.pos_SW < canvas.end_S[:, None])
        best_SK = order(rank(scores.neg_doubt_SN.masked_fill(~open_SW, -torch.inf)), self.num_search)
        pos_SK, token_SK, valid_SK = (x.gather(1, best_SK) for x in (scores.pos_SW, scores.token_SN, open_SW))
        place_K = torch.arange(best_SK.shape[1], device=best_SK.device)
        missing = self.num_search - best_SK.shape[1]  # fewer columns than can be searched
        valid_SK = valid_SK & (place_K < params.search_S[:, None])
        return Search(*(torch.nn.functional.pad(x, (0, missing)) for x in (pos_SK, token_SK, valid_SK)))

    def _rows(self, canvas: Canvas, params: DecodeParams, search: Search) -> Scratch:
        """The second pass."""
        context_ST, has_context_ST = self._context(canvas, search.valid_SK.sum(1))
        valid_SX = torch.cat((has_context_ST, search.valid_SK, search.valid_SK), 1)
        pos_SX = torch.cat((context_ST, search.pos_SK, search.pos_SK), 1)
        mask_SK = torch.full_like(search.token_SK, canvas.mask_token_id)
        column_X = canvas.capacity + torch.arange(self.num_scratch, device=pos_SX.device)
        live_valid_SJ = torch.cat((valid_SX, search.valid_SK), 1)
        strict_XJ, reference_XJ = self._tables(pos_SX.device)
        table_SXJ = torch.where(params.isolated_S[:, None, None], strict_XJ, reference_XJ)
        return Scratch(
            token_SX=torch.cat((canvas.token_SN.gather(1, context_ST).long(), search.token_SK, mask_SK), 1),
            pos_SX=pos_SX,
            valid_SX=valid_SX,
            live_SJ=torch.cat((column_X.expand(len(pos_SX), -1), search.pos_SK), 1),
            canvas_bits_SJ=torch.zeros_like(live_valid_SJ),
            bits_SXJ=table_SXJ & live_valid_SJ[:, None, :],
            shadow_SN=spread(torch.ones_like(valid_SX), pos_SX, valid_SX, canvas.capacity),
        )

    def _context(self, canvas: Canvas, num_searched_S: Tensor) -> tuple[Tensor, Tensor]:
        """Decided positions that the second pass sees afresh, and which of them there are.

        What this step committed, what the step before did, both from the left, then the rest by the mass of the pass
        before this one.
        """
        room_S = (self.num_rows - 2 * num_searched_S).clamp(min=0) * (num_searched_S > 0)
        decided_SN = canvas.visible_SN() & canvas.final_SN
        now_SN, before_SN = canvas.new_SN(), canvas.new_SN(ago=1)
        pos_SN = canvas.pos_1N().expand_as(decided_SN)
        weight_SN = torch.where(now_SN | before_SN, -pos_SN.float(), canvas.mass_SN)
        class_SN = (decided_SN.int() + before_SN + 2 * now_SN).masked_fill(~decided_SN, 0)
        by_weight_SN = weight_SN.argsort(dim=1, descending=True, stable=True)
        by_class_SN = class_SN.gather(1, by_weight_SN).argsort(dim=1, descending=True, stable=True)
        num_context = min(self.num_context, canvas.capacity)
        context_ST = by_weight_SN.gather(1, by_class_SN)[:, :num_context]
        place_T = torch.arange(num_context, device=context_ST.device)
        has_ST = decided_SN.gather(1, context_ST) & (place_T < room_S[:, None])
        missing = (0, self.num_context - num_context)
        return torch.nn.functional.pad(context_ST, missing), torch.nn.functional.pad(has_ST, missing)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """In strict isolation and in the reference's. Kept: made anew they are 32 kernels of a step."""
        if self._kept is None or self._kept[0].device != device:
            self._kept = self._table(True, device), self._table(False, device)
        return self._kept

    def _table(self, strict: bool, device: torch.device) -> Tensor:
        """Who sees which live entry: rows and columns [context | drafts | masks], and the cached masks as columns.

        Each row sees every searched position once: its draft if it comes earlier in order, a MASK otherwise.
        """
        num_context, K = self.num_context, self.num_search
        order_K = torch.arange(K, device=device)
        earlier_KK, later_KK = order_K[:, None] > order_K, order_K[:, None] < order_K
        none_KK, self_KK = torch.zeros_like(earlier_KK), order_K[:, None] == order_K
        all_TK = torch.ones(num_context, K, dtype=torch.bool, device=device)
        live_later_KK, cached_later_KK = (none_KK, later_KK) if strict else (later_KK, none_KK)
        live_TK, cached_TK = (~all_TK, all_TK) if strict else (all_TK, ~all_TK)
        context = torch.cat((all_TK.new_ones(num_context, num_context), ~all_TK, live_TK, cached_TK), 1)
        sees_context = all_TK.new_ones(K, num_context)
        drafts = torch.cat((sees_context, earlier_KK | self_KK, live_later_KK, cached_later_KK), 1)
        masks = torch.cat((sees_context, earlier_KK, live_later_KK | self_KK, cached_later_KK), 1)
        return torch.cat((context, drafts, masks))

    def accept(self, canvas: Canvas, params: DecodeParams, search: Search, seen: Prediction) -> Tensor:
        """Commit the longest run of drafts that pass; how many did.

        By agreement: the MASK row predicts the draft, at least as sure as gamma. By product: so is the product of the
        drafts' probabilities so far, whatever the MASK rows predict (the released code).
        """
        gamma_S1 = params.gamma_S[:, None]
        agrees_SK = (seen.token_SW == search.token_SK) & (seen.asked_prob_SW >= gamma_S1)
        likely_SK = torch.where(search.valid_SK, seen.asked_prob_SW, 0).cumprod(1) >= gamma_S1
        passes_SK = search.valid_SK & torch.where(params.product_S[:, None], likely_SK, agrees_SK)
        accepted_SK = (~passes_SK).cumsum(1) == 0
        columns = (search.pos_SK, accepted_SK, search.token_SK, seen.asked_prob_SW)
        commit(canvas, params, *columns, new_step=False)
        return (accepted_SK & (search.pos_SK < canvas.end_S[:, None])).sum(1)
