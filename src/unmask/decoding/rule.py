"""Which predictions become final? One rule for all requests of a batch.

S seats, N positions. The schedule caps how many commit, acceptances say which, and a rescue keeps every pass useful:

    rank      candidates by probability, margin, negative entropy or at random (leftmost first on ties)
    cap       quota of this step + what earlier steps left over; no cap for adaptive rules
    accept    probability >= threshold, or within the factor's or the entropy's bound, or filled by chance
    commit    rank < cap and accepted; in a group where nothing is, the best candidate within the cap

Each parameter has a neutral value that switches its part off, so that one batch mixes all rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.core.canvas import Canvas
from unmask.core.scores import Scores
from unmask.decoding.frontier import FrontierView
from unmask.decoding.params import ENTROPY, MARGIN, RANDOM, DecodeParams
from unmask.decoding.sample import FILL, ORDER, RANK, gumbel, uniform

UNCAPPED = 1 << 30


def choose(canvas: Canvas, view: FrontierView, scores: Scores, params: DecodeParams) -> Tensor:
    """bool [S, N]: the candidates to commit now. Advances each active seat's place in its schedule."""
    candidate_SN = view.candidate_SN & scores.scored_SN
    key_SN = _key(canvas, scores, params).masked_fill(~candidate_SN, -torch.inf)
    order_SN = key_SN.argsort(dim=1, descending=True, stable=True)
    rank_SN = torch.empty_like(order_SN).scatter_(1, order_SN, _ranks(canvas).expand_as(order_SN).contiguous())
    cap_S = _cap(canvas, params)
    open_SN = candidate_SN & (rank_SN < cap_S[:, None])
    commit_SN = open_SN & _accepted(canvas, scores, params, order_SN, candidate_SN)
    commit_SN |= _rescued(commit_SN, open_SN, rank_SN, view.rescue_group_SN, params)
    _advance(canvas, params, cap_S, candidate_SN, commit_SN)
    return commit_SN


def _ranks(canvas: Canvas) -> Tensor:
    return torch.arange(canvas.capacity, device=canvas.device).unsqueeze(0)


def _key(canvas: Canvas, scores: Scores, params: DecodeParams) -> Tensor:
    """What positions are ranked by, [S, N].

    With `alg_temp` the order is a draw without replacement from softmax(score / alg_temp).
    """
    kind_S1 = params.score_kind_S[:, None]
    key_SN = scores.prob_SN
    needs = params.needs
    if needs.margin:
        key_SN = torch.where(kind_S1 == MARGIN, scores.margin_SN, key_SN)
    if needs.entropy:
        key_SN = torch.where(kind_S1 == ENTROPY, scores.neg_entropy_SN, key_SN)
    if needs.random_rank:
        chance_SN = uniform(params.seed_S, canvas.pos_1N(), canvas.pass_S, RANK)
        key_SN = torch.where(kind_S1 == RANDOM, chance_SN, key_SN)
    if needs.alg_temp:
        noise_SN = gumbel(uniform(params.seed_S, canvas.pos_1N(), canvas.pass_S, ORDER))
        warm_S1 = params.alg_temp_S[:, None]
        key_SN = torch.where(warm_S1 > 0, key_SN + warm_S1 * noise_SN, key_SN)
    return key_SN


def _cap(canvas: Canvas, params: DecodeParams) -> Tensor:
    """int64 [S]: the most that may commit in this pass."""
    quota_S = params.at_step(params.quota_ST, canvas.sched_S) + canvas.carry_S
    return torch.where(params.capped_S, quota_S.long(), UNCAPPED)


def _accepted(canvas: Canvas, scores: Scores, params: DecodeParams, order_SN: Tensor, candidate_SN: Tensor) -> Tensor:
    prob_SN, threshold_S1 = scores.prob_SN, params.threshold_S[:, None]
    accepted_SN = (prob_SN >= threshold_S1) & ~(params.strict_S[:, None] & (prob_SN == threshold_S1))
    if params.needs.factor:
        accepted_SN = accepted_SN | _by_factor(prob_SN, params.factor_S, order_SN)
    if params.needs.entropy_bound:
        accepted_SN = accepted_SN | _by_entropy(scores.neg_entropy_SN, params.entropy_bound_S, order_SN, candidate_SN)
    if params.needs.fill:
        chance_SN = uniform(params.seed_S, canvas.pos_1N(), canvas.pass_S, FILL)
        accepted_SN = accepted_SN | (chance_SN < params.at_step(params.fill_ST, canvas.sched_S)[:, None])
    return accepted_SN


def _prefix(holds_sorted_SN: Tensor, order_SN: Tensor) -> Tensor:
    """Positions up to the first in order at which the condition fails, back in canvas order."""
    kept_SN = (~holds_sorted_SN).cumsum(1) == 0
    return torch.empty_like(kept_SN).scatter_(1, order_SN, kept_SN)


def _by_factor(prob_SN: Tensor, factor_S: Tensor, order_SN: Tensor) -> Tensor:
    """Fast-dLLM's factor rule: the n-th in order passes while its confidence >= 1 - factor / (n + 1)."""
    n_1N = torch.arange(1, prob_SN.shape[1] + 1, device=prob_SN.device).unsqueeze(0)
    bound_SN = 1 - factor_S[:, None] / (n_1N + 1)
    holds_SN = (prob_SN.gather(1, order_SN) >= bound_SN) & (factor_S > 0)[:, None]
    return _prefix(holds_SN, order_SN)


def _by_entropy(neg_entropy_SN: Tensor, bound_S: Tensor, order_SN: Tensor, candidate_SN: Tensor) -> Tensor:
    """EB-Sampler: a prefix in order whose entropies sum to at most bound + their largest."""
    entropy_SN = (-neg_entropy_SN).masked_fill(~candidate_SN, 0).gather(1, order_SN)
    others_SN = entropy_SN.cumsum(1) - entropy_SN.cummax(1).values
    # The largest is subtracted after it was added: a slack of rounding keeps "exactly at the bound" inside.
    return _prefix(others_SN <= bound_S[:, None] + 1e-6, order_SN)


def _rescued(commit_SN: Tensor, open_SN: Tensor, rank_SN: Tensor, group_SN: Tensor, params: DecodeParams) -> Tensor:
    """The best open candidate of every group in which nothing commits."""
    num_seats, capacity = commit_SN.shape
    grouped_SN = open_SN & (group_SN >= 0)
    group_SN = torch.where(grouped_SN, group_SN, capacity)  # everything else meets in one spare group
    claim_SN = rank_SN.masked_fill(commit_SN, -1)  # a commit outranks all: nobody else is the group's best then
    best_SK = torch.full((num_seats, capacity + 1), capacity, dtype=rank_SN.dtype, device=rank_SN.device)
    best_SK.scatter_reduce_(1, group_SN, claim_SN, "amin")
    return grouped_SN & params.rescue_S[:, None] & (rank_SN == best_SK.gather(1, group_SN))


def _advance(canvas: Canvas, params: DecodeParams, cap_S: Tensor, candidate_SN: Tensor, commit_SN: Tensor) -> None:
    looked_at_S = torch.minimum(cap_S, candidate_SN.sum(1))
    left_over_S = torch.where(params.carries_S, looked_at_S - commit_SN.sum(1), 0)
    canvas.carry_S.copy_(torch.where(canvas.active_S, left_over_S.int(), canvas.carry_S))
    canvas.sched_S += canvas.active_S.int()
