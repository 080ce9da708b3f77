"""Predictions for canvas positions, by each seat's own parameters.

C scored rows, D hidden size, V vocabulary, b ids banned for all, B and E banned and ending ids of a seat
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unmask import ops
from unmask.core.canvas import Canvas
from unmask.decoding.params import DecodeParams
from unmask.decoding.sample import TOKEN, uniform
from unmask.models.attention import AttentionContext, RopeTable
from unmask.models.config import ModelConfig


class Model(Protocol):
    """What the engine needs of a network; `unmask.models.transformer.Transformer` is one."""

    config: ModelConfig
    rope: RopeTable

    @property
    def head(self) -> Tensor: ...

    def __call__(self, token: Tensor, ctx: AttentionContext) -> Tensor: ...


def banned_ids(model: Model, unknown_ids: Sequence[int]) -> Tensor:
    """int64 [b]: what no row may predict, MASK and the ids that the tokenizer does not know."""
    banned = sorted({model.config.mask_token_id, *unknown_ids})
    return torch.tensor(banned, dtype=torch.int64, device=model.head.device)


def predict(
    hidden_CD: Tensor,
    head_VD: Tensor,
    banned_b: Tensor,
    seat_C: Tensor,
    pos_C: Tensor,
    canvas: Canvas,
    params: DecodeParams,
    purpose: int = TOKEN,
    ask_C: Tensor | None = None,
) -> ops.LogitStats:
    """Token and confidence of each row, for the position it scores. Nothing leaves the device.

    ``purpose`` keeps the random numbers of a second pass of the same step apart from the first's; ``ask_C`` asks for
    one more token's probability.
    """
    needs = params.needs
    ban_argmax_CB = ban_softmax_CB = None
    if needs.banned or needs.stats_banned:
        early_C = pos_C < canvas.prompt_S[seat_C] + params.min_tokens_S[seat_C]
        early_CE = torch.where(early_C[:, None], params.eos_SE[seat_C].long(), -1)
        ban_argmax_CB = torch.cat((params.ban_argmax_SB[seat_C], early_CE), 1)
        ban_softmax_CB = torch.cat((params.ban_softmax_SB[seat_C], early_CE), 1)
    return ops.logit_stats(
        hidden_CD,
        head_VD,
        banned_b=banned_b,
        ban_argmax_CB=ban_argmax_CB,
        ban_softmax_CB=ban_softmax_CB if needs.stats_banned else None,
        sampling=_sampling(seat_C, pos_C, canvas, params, purpose) if needs.sampled or needs.filtered else None,
        margin=needs.margin,
        entropy=needs.entropy,
        ask_C=ask_C,
    )


def guide(with_D: Tensor, without_D: Tensor, scale: Tensor, guided: Tensor) -> Tensor:
    """Classifier-free guidance on hidden rows [.., D], u + (w + 1)(c - u): exact, since the head is linear.

    ``without`` comes from the masked prompt; ``scale`` and ``guided`` [..] say how much and which rows.
    """
    mixed_D = without_D + (scale[..., None].to(with_D.dtype) + 1) * (with_D - without_D)
    return torch.where(guided[..., None], mixed_D, with_D)


def _sampling(seat_C: Tensor, pos_C: Tensor, canvas: Canvas, params: DecodeParams, purpose: int) -> ops.Sampling:
    chance_SN = uniform(params.seed_S, canvas.pos_1N(), canvas.pass_S, purpose)
    return ops.Sampling(
        params.temperature_S[seat_C],
        params.top_p_S[seat_C],
        params.top_k_S[seat_C],
        params.min_p_S[seat_C],
        params.temper_S[seat_C],
        chance_SN[seat_C, pos_C],
    )
