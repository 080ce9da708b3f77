"""From hidden rows to a predicted token and how sure it is, without ever holding rows x vocabulary.

C scored rows, D hidden size, V vocabulary, B banned ids of a row, c rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # fp32 logits and what is derived from them at one time
_COPIES = 4  # tensors of chunk x vocabulary alive at once on the sampling path


@dataclass(frozen=True)
class Sampling:
    """How each row draws its token; the neutral value (0, 1, 0, 0) takes the arg-max of the whole vocabulary."""

    temperature_C: Tensor
    top_p_C: Tensor
    top_k_C: Tensor
    min_p_C: Tensor
    temper_C: Tensor
    """bool: confidence under the temperature, too."""
    uniform_C: Tensor
    """float32 in [0, 1): the row's random number."""

    def rows(self, part: slice) -> Sampling:
        return Sampling(*(value[part] for value in vars(self).values()))


@dataclass(frozen=True)
class LogitStats:
    """One value per scored row."""

    token_C: Tensor
    """int64"""
    prob_C: Tensor
    """float32: probability of the token."""
    neg_doubt_C: Tensor
    """float32: probability - 1, of the same relative precision near 0."""
    neg_lag_C: Tensor
    """float32: probability of the best token minus the second best, - 1, as precise; zeros unless asked for."""
    neg_entropy_C: Tensor
    """float32: sum p log p, nats, as precise; zeros unless asked for."""
    asked_prob_C: Tensor
    """float32: probability of the token in `ask_C`; zeros without it."""


def logit_stats(
    hidden_CD: Tensor,
    head_VD: Tensor,
    *,
    banned_b: Tensor | None = None,
    ban_argmax_CB: Tensor | None = None,
    ban_softmax_CB: Tensor | None = None,
    sampling: Sampling | None = None,
    margin: bool = False,
    entropy: bool = False,
    ask_C: Tensor | None = None,
) -> LogitStats:
    """Token, probability and, when asked for, margin and entropy of each row's softmax(hidden @ head^T).

    ``banned_b`` int64: ids no row may predict; like ``ban_argmax_CB`` (-1: none) they stay in the softmax.
    ``ban_softmax_CB`` ids have probability 0; such an id may still be predicted, with confidence 0, unless it is
    banned from the arg-max too. With ``sampling``, top_p, top_k and min_p keep tokens by the distribution at the
    row's temperature; the token is drawn from those, and its confidence is its share of the kept ones at
    temperature 1 (or the row's, with ``temper``). ``ask_C`` int64 asks for one more token's probability, under the same
    softmax. Statistics are float32. Ties go to the lowest id.
    """
    num_rows = hidden_CD.shape[0]
    copies = _COPIES if sampling is not None else 2
    chunk = max(1, CHUNK_BYTES // (copies * 4 * head_VD.shape[0]))
    parts = [slice(start, min(start + chunk, num_rows)) for start in range(0, num_rows, chunk)]

    def take(value: Tensor | None, part: slice) -> Tensor | None:
        return None if value is None else value[part]

    pieces = [
        _chunk(
            torch.nn.functional.linear(hidden_CD[part], head_VD).float(),
            banned_b,
            take(ban_argmax_CB, part),
            take(ban_softmax_CB, part),
            None if sampling is None else sampling.rows(part),
            margin,
            entropy,
            take(ask_C, part),
        )
        for part in parts
    ]
    if not pieces:
        real = hidden_CD.new_zeros(0, dtype=torch.float32)
        return LogitStats(hidden_CD.new_zeros(0, dtype=torch.int64), *[real] * 5)
    return LogitStats(*(torch.cat(column) for column in zip(*pieces)))


def _chunk(
    logits_cV: Tensor,
    banned_b: Tensor | None,
    ban_argmax_cB: Tensor | None,
    ban_softmax_cB: Tensor | None,
    sampling: Sampling | None,
    margin: bool,
    entropy: bool,
    ask_c: Tensor | None,
) -> tuple[Tensor, ...]:
    weight_cV = logits_cV  # what the softmax is taken of
    if ban_softmax_cB is not None:
        weight_cV = _ban(logits_cV.clone(), ban_softmax_cB)
    norm_c = Norm.of(weight_cV)
    zero_c = torch.zeros_like(norm_c.highest_c)
    neg_entropy_c = norm_c.neg_entropy(weight_cV) if entropy else zero_c
    choice_cV = _choices(logits_cV, banned_b, ban_argmax_cB, keep=sampling is not None)
    if sampling is None:
        token_c = choice_cV.argmax(1)
    else:
        token_c, weight_cV, norm_c = _draw(choice_cV, weight_cV, norm_c, sampling)
        if entropy:
            neg_entropy_c = norm_c.neg_entropy(weight_cV)
    prob_c, neg_doubt_c = norm_c.prob(weight_cV, token_c)
    neg_lag_c = _neg_lag(weight_cV, norm_c, choice_cV) if margin else zero_c
    asked_c = zero_c if ask_c is None else norm_c.prob(weight_cV, ask_c)[0]
    return token_c, prob_c, neg_doubt_c, neg_lag_c, neg_entropy_c, asked_c


def _ban(logits_cV: Tensor, ids_cB: Tensor) -> Tensor:
    """-inf at the ids, in place; -1 is no id. A minimum, since an unused entry must not undo a used one."""
    value_cB = torch.where(ids_cB >= 0, -torch.inf, torch.inf).to(logits_cV.dtype)
    return logits_cV.scatter_reduce_(1, ids_cB.clamp(min=0), value_cB, "amin")


def _choices(logits_cV: Tensor, banned_b: Tensor | None, ban_cB: Tensor | None, keep: bool) -> Tensor:
    """Logits of the tokens that may be predicted. A copy only where the untouched ones are needed afterwards."""
    if banned_b is None and ban_cB is None:
        return logits_cV
    choice_cV = logits_cV.clone() if keep else logits_cV
    if banned_b is not None:
        choice_cV.index_fill_(1, banned_b, -torch.inf)
    return choice_cV if ban_cB is None else _ban(choice_cV, ban_cB)


@dataclass(frozen=True)
class Norm:
    """What a row's softmax divides by: its highest weight, and all others beside it.

    A log-sum-exp in one number would do, but at logits of 30 its last bit is 2e-6 of a probability, and a probability's
    own last bit is 6e-8: what sure tokens lack is smaller, and they would be ranked by rounding.
    """

    highest_c: Tensor
    top_c: Tensor
    """The first token that has it."""
    rest_c: Tensor
    """Sum of exp(weight - highest) over all tokens but that one."""

    @classmethod
    def of(cls, weight_cV: Tensor) -> Norm:
        top_c = weight_cV.argmax(1)
        highest_c = weight_cV.gather(1, top_c[:, None])[:, 0]
        share_cV = (weight_cV - highest_c[:, None]).exp_()
        return cls(highest_c, top_c, share_cV.scatter_(1, top_c[:, None], 0).sum(1))

    def prob(self, weight_cV: Tensor, token_c: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of a token in each row, and that less 1."""
        total_c = 1 + self.rest_c
        prob_c = (weight_cV.gather(1, token_c[:, None])[:, 0] - self.highest_c).exp() / total_c
        return prob_c, torch.where(token_c == self.top_c, -self.rest_c / total_c, prob_c - 1)

    def neg_entropy(self, weight_cV: Tensor) -> Tensor:
        """Sum p log p; the highest weight's part of it is the logarithm alone."""
        below_cV = weight_cV - self.highest_c[:, None]
        share_cV = below_cV.exp()
        return torch.where(share_cV > 0, share_cV * below_cV, 0).sum(1) / (1 + self.rest_c) - self.rest_c.log1p()

    def where(self, renormed_c: Tensor, other: Norm) -> Norm:
        """This one in the rows ``renormed``, the other in the rest."""
        return Norm(*(torch.where(renormed_c, a, b) for a, b in zip(vars(self).values(), vars(other).values())))


def _neg_lag(weight_cV: Tensor, norm_c: Norm, choice_cV: Tensor) -> Tensor:
    """p1 - p2 - 1 among the tokens that may be predicted."""
    allowed_cV = weight_cV.masked_fill(choice_cV == -torch.inf, -torch.inf)
    best = allowed_cV.topk(2, dim=1)
    first_c, second_c = (best.values - norm_c.highest_c[:, None]).exp().unbind(1)
    is_top_c = best.values[:, 0] == norm_c.highest_c
    total_c = 1 + norm_c.rest_c
    return -torch.where(is_top_c, norm_c.rest_c + second_c, total_c - first_c + second_c) / total_c


def _draw(choice_cV: Tensor, weight_cV: Tensor, norm_c: Norm, s: Sampling) -> tuple[Tensor, Tensor, Norm]:
    """Token of each row, and the weights and norm that its confidence is taken from."""
    warm_c1 = torch.where(s.temperature_C > 0, s.temperature_C, 1.0)[:, None]
    tempered_cV = choice_cV / warm_c1
    filters_c = (s.top_p_C < 1) | (s.top_k_C > 0) | (s.min_p_C > 0)
    kept_cV = _kept(tempered_cV, s) | ~filters_c[:, None]
    drawn_c = _inverse_cdf(tempered_cV.masked_fill(~kept_cV, -torch.inf), s.uniform_C)
    token_c = torch.where(s.temperature_C > 0, drawn_c, choice_cV.argmax(1))
    weight_cV = torch.where(s.temper_C[:, None], weight_cV / warm_c1, weight_cV)
    weight_cV = weight_cV.masked_fill(~kept_cV, -torch.inf)
    renormed_c = filters_c | s.temper_C
    return token_c, weight_cV, Norm.of(weight_cV).where(renormed_c, norm_c)


def _kept(tempered_cV: Tensor, s: Sampling) -> Tensor:
    """bool: tokens that top_p, top_k and min_p leave, in that order, each by the distribution at the temperature."""
    p_cV = tempered_cV.softmax(1)
    sorted_cV, order_cV = p_cV.sort(dim=1, descending=True, stable=True)
    before_cV = sorted_cV.cumsum(1) - sorted_cV
    nucleus_cV = (before_cV < s.top_p_C[:, None]) | (s.top_p_C >= 1)[:, None]
    rank_1V = torch.arange(p_cV.shape[1], device=p_cV.device).unsqueeze(0)
    top_k_cV = (rank_1V < s.top_k_C[:, None]) | (s.top_k_C <= 0)[:, None]
    likely_cV = sorted_cV >= s.min_p_C[:, None] * sorted_cV[:, :1]
    kept_cV = nucleus_cV & top_k_cV & likely_cV
    kept_cV[:, 0].fill_(True)
    return torch.empty_like(kept_cV).scatter_(1, order_cV, kept_cV)


def _inverse_cdf(logits_cV: Tensor, uniform_c: Tensor) -> Tensor:
    """One draw a row: the first token whose cumulative probability passes the row's random number."""
    total_cV = logits_cV.softmax(1).cumsum(1)
    goal_c1 = uniform_c[:, None] * total_cV[:, -1:]
    return (total_cV <= goal_c1).sum(1).clamp(max=logits_cV.shape[1] - 1)
