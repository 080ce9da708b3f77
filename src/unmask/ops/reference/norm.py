"""Root-mean-square norm, alone and behind the addition to the stream."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the rows of `x` [.., D] to unit mean square, then apply the gain `weight` [D].

    Statistics in fp32 (fp64 stays fp64). The cast to x's dtype comes before the gain, as in the LLaDA and Dream
    weights' own code: in bf16 the other order rounds differently.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return unit.to(x.dtype) * weight


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The stream after ``delta`` was added to it, and its norm: what stands between any two products of a layer."""
    total = x + delta
    return total, rms_norm(total, weight, eps)
