"""The masked diffusion loss.

B rows, N positions, V vocabulary

    loss = sum over masked positions of weight * CE / number of positions of the loss region in the whole step

With weight 1/t this is an upper bound on the negative log-likelihood per position, averaged over the rates t.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.models.attention import DenseContext
from unmask.models.transformer import Transformer


def cross_entropy(logits_BNV: Tensor, target_BN: Tensor) -> Tensor:
    """Cross-entropy [B, N], in fp32 at least."""
    wide = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), target_BN.flatten(), reduction="none").view(target_BN.shape)


def weighted_loss(logits_BNV: Tensor, target_BN: Tensor, weight_BN: Tensor) -> Tensor:
    """Sum of weight * CE. Weights carry the step's denominator already, so parts of a step add up."""
    return (cross_entropy(logits_BNV, target_BN) * weight_BN).sum()


def forward_logits(model: Transformer, token_BN: Tensor, see_B: Tensor) -> Tensor:
    """Logits [B, N, V] of every position. Rows see the keys [0, see) of their own row; in a block-causal model, which
    is trained with a prompt of `see` positions and blocks of one, those behind it see up to themselves."""
    pos_N = torch.arange(token_BN.shape[1], device=token_BN.device)
    if model.config.attention == "block_causal":
        mask_BNN = (pos_N[:, None] >= pos_N) | (pos_N < see_B[:, None, None])
        context = DenseContext(pos_N, mask=mask_BNN, rope=model.rope)
    else:
        context = DenseContext(pos_N, see=see_B, rope=model.rope)
    logits: Tensor = model.logits(model(token_BN, context))
    shift = model.config.logit_shift
    return F.pad(logits[:, : logits.shape[1] - shift], (0, 0, shift, 0)) if shift else logits


def forward_loss(model: Transformer, token_BN: Tensor, see_B: Tensor, target_BN: Tensor, weight_BN: Tensor) -> Tensor:
    """Forward and loss in one function: what is compiled."""
    return weighted_loss(forward_logits(model, token_BN, see_B), target_BN, weight_BN)
