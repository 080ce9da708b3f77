"""Rotary position embedding, half-split."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of `x` [.., H, hd] by the angles of their rows; `cos`, `sin` fp32 [.., hd/2].

    Half-split: dimension i turns with dimension i + hd/2 (not with i + 1). Computed in fp32 and cast back.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    low, high = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
