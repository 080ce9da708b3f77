"""Which predictions become final? One rule for all requests of a batch.

S seats, W columns: all canvas positions, or the slots that a fixed-shape step packs its candidates into. The schedule
caps how many commit, acceptances say which, and a rescue keeps every pass useful:

    rank      candidates by probability, margin, negative entropy or at random (leftmost first on ties)
    cap       quota of this step + what earlier steps left over; no cap for adaptive rules
    accept    probability >= threshold, or within the factor's or the entropy's bound, or filled by chance
    commit    rank < cap and accepted; in a group where nothing is, the best candidate within the cap

Each parameter has a neutral value that switches its part off, so that one batch mixes all rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.core.canvas import Canvas, put
from unmask.core.scores import Scores
from unmask.decoding.frontier import FrontierView
from unmask.decoding.params import ENTROPY, MARGIN, RANDOM, DecodeParams
from unmask.decoding.sample import FILL, ORDER, RANK, gumbel, uniform

UNCAPPED = 1 << 30
PAIRWISE = 128  # up to this many columns comparing all pairs beats sorting: two fused kernels, and no host decision


def choose(canvas: Canvas, view: FrontierView, scores: Scores, params: DecodeParams) -> Tensor:
    """bool [S, W]: the candidates to commit now. Advances each active seat's place in its schedule.

    ``view`` and ``scores`` have the same columns; `scores.pos_SW` says which positions they are.
    """
    candidate_SW = view.candidate_SN & scores.scored_SN
    key_SW = _key(canvas, scores, params).masked_fill(~candidate_SW, -torch.inf)
    rank_SW = rank(key_SW)
    cap_S = _cap(canvas, params)
    open_SW = candidate_SW & (rank_SW < cap_S[:, None])
    commit_SW = open_SW & _accepted(canvas, scores, params, rank_SW, candidate_SW)
    commit_SW = commit_SW | _rescued(commit_SW, open_SW, rank_SW, view.rescue_group_SN, params)
    _advance(canvas, params, cap_S, commit_SW)
    return commit_SW


def rank(key_SW: Tensor) -> Tensor:
    """Place of each column by descending key, the leftmost first on ties."""
    place_W = torch.arange(key_SW.shape[1], device=key_SW.device)
    if key_SW.shape[1] <= PAIRWISE:
        mine, other = key_SW[:, :, None], key_SW[:, None, :]
        earlier_WW = place_W[None, :] < place_W[:, None]
        return ((other > mine) | ((other == mine) & earlier_WW)).sum(2)
    order_SW = key_SW.argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order_SW).scatter_(1, order_SW, place_W.expand_as(order_SW).contiguous())


def order(rank_SW: Tensor, count: int) -> Tensor:
    """Columns of the first ``count`` ranks, in order: [S, count]."""
    place_SW = torch.arange(rank_SW.shape[1], device=rank_SW.device).expand_as(rank_SW)
    return torch.empty_like(rank_SW).scatter_(1, rank_SW, place_SW)[:, :count]


def _key(canvas: Canvas, scores: Scores, params: DecodeParams) -> Tensor:
    """What columns are ranked by, [S, W].

    With `alg_temp` the order is a draw without replacement from softmax(score / alg_temp).
    """
    kind_S1 = params.score_kind_S[:, None]
    key_SW = scores.neg_doubt_SN
    needs = params.needs
    if needs.margin:
        key_SW = torch.where(kind_S1 == MARGIN, scores.neg_lag_SN, key_SW)
    if needs.entropy:
        key_SW = torch.where(kind_S1 == ENTROPY, scores.neg_entropy_SN, key_SW)
    if needs.random_rank:
        key_SW = torch.where(kind_S1 == RANDOM, chance_order(canvas, params, scores.pos_SW), key_SW)
    if needs.alg_temp:
        noise_SW = gumbel(uniform(params.seed_S, scores.pos_SW, canvas.pass_S, ORDER))
        warm_S1 = params.alg_temp_S[:, None]
        key_SW = torch.where(warm_S1 > 0, key_SW + warm_S1 * noise_SW, key_SW)
    return key_SW


def _cap(canvas: Canvas, params: DecodeParams) -> Tensor:
    """int64 [S]: the most that may commit in this pass."""
    return torch.where(params.capped_S, quota(canvas, params).long(), UNCAPPED)


def quota(canvas: Canvas, params: DecodeParams) -> Tensor:
    """int [S]: what a schedule has for this pass, with what earlier ones left over."""
    return params.at_step(params.quota_ST, canvas.sched_S) + canvas.carry_S


def chance_order(canvas: Canvas, params: DecodeParams, pos_SW: Tensor) -> Tensor:
    """fp32 [S, W]: what a random schedule ranks positions by in this pass."""
    return uniform(params.seed_S, pos_SW, canvas.pass_S, RANK)


def filled(canvas: Canvas, params: DecodeParams, pos_SW: Tensor) -> Tensor:
    """bool [S, W]: positions that chance decides in this pass."""
    chance_SW = uniform(params.seed_S, pos_SW, canvas.pass_S, FILL)
    return chance_SW < params.at_step(params.fill_ST, canvas.sched_S)[:, None]


def _accepted(canvas: Canvas, scores: Scores, params: DecodeParams, rank_SW: Tensor, candidate_SW: Tensor) -> Tensor:
    prob_SW, threshold_S1 = scores.prob_SN, params.threshold_S[:, None]
    accepted_SW = (prob_SW >= threshold_S1) & ~(params.strict_S[:, None] & (prob_SW == threshold_S1))
    if params.needs.factor:
        accepted_SW = accepted_SW | _by_factor(prob_SW, params.factor_S, rank_SW)
    if params.needs.entropy_bound:
        accepted_SW = accepted_SW | _by_entropy(scores.neg_entropy_SN, params.entropy_bound_S, rank_SW, candidate_SW)
    if params.needs.fill:
        accepted_SW = accepted_SW | filled(canvas, params, scores.pos_SW)
    return accepted_SW


def _by_rank(value_SW: Tensor, rank_SW: Tensor) -> Tensor:
    """Columns in order of rank."""
    return torch.zeros_like(value_SW).scatter(1, rank_SW, value_SW)


def _prefix(holds_ranked_SW: Tensor, rank_SW: Tensor) -> Tensor:
    """Columns before the first in order of rank at which the condition fails."""
    return ((~holds_ranked_SW).cumsum(1) == 0).gather(1, rank_SW)


def _by_factor(prob_SW: Tensor, factor_S: Tensor, rank_SW: Tensor) -> Tensor:
    """Fast-dLLM's factor rule: the n-th in order passes while its confidence >= 1 - factor / (n + 1)."""
    n_1W = torch.arange(1, prob_SW.shape[1] + 1, device=prob_SW.device).unsqueeze(0)
    bound_SW = 1 - factor_S[:, None] / (n_1W + 1)
    holds_SW = (_by_rank(prob_SW, rank_SW) >= bound_SW) & (factor_S > 0)[:, None]
    return _prefix(holds_SW, rank_SW)


def _by_entropy(neg_entropy_SW: Tensor, bound_S: Tensor, rank_SW: Tensor, candidate_SW: Tensor) -> Tensor:
    """EB-Sampler: a prefix in order whose entropies sum to at most bound + their largest."""
    entropy_SW = _by_rank((-neg_entropy_SW).masked_fill(~candidate_SW, 0), rank_SW)
    others_SW = entropy_SW.cumsum(1) - entropy_SW.cummax(1).values
    # The largest is subtracted after it was added: a slack of rounding keeps "exactly at the bound" inside.
    return _prefix(others_SW <= bound_S[:, None] + 1e-6, rank_SW)


def _rescued(commit_SW: Tensor, open_SW: Tensor, rank_SW: Tensor, group_SW: Tensor, params: DecodeParams) -> Tensor:
    """The best open candidate of every group in which nothing commits."""
    grouped_SW = open_SW & (group_SW >= 0)
    claim_SW = rank_SW.masked_fill(commit_SW, -1)  # a commit outranks all: nobody else is the group's best then
    best_SW = _least_of_group(claim_SW, torch.where(grouped_SW, group_SW, -1))
    return grouped_SW & params.rescue_S[:, None] & (rank_SW == best_SW)


def _least_of_group(value_SW: Tensor, group_SW: Tensor) -> Tensor:
    """The least value among the columns of the same group. Group numbers are below the width for wide canvases."""
    width = value_SW.shape[1]
    if width <= PAIRWISE:
        same_SWW = group_SW[:, :, None] == group_SW[:, None, :]
        return torch.where(same_SWW, value_SW[:, None, :], UNCAPPED).amin(2)
    slot_SW = torch.where(group_SW >= 0, group_SW, width)
    least = torch.full((len(value_SW), width + 1), UNCAPPED, dtype=value_SW.dtype, device=value_SW.device)
    return least.scatter_reduce_(1, slot_SW, value_SW, "amin").gather(1, slot_SW)


def _advance(canvas: Canvas, params: DecodeParams, cap_S: Tensor, commit_SW: Tensor) -> None:
    left_over_S = torch.where(params.carries_S, cap_S - commit_SW.sum(1), 0)
    put(canvas.carry_S, canvas.active_S, left_over_S.int())
    canvas.sched_S += canvas.active_S.int()
