"""The product with a weight matrix, in 16 or 32 bits or in 8, and the one whose halves meet in the gated activation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from unmask.ops.reference.fp8 import Fp8Rows, Fp8Weight, linear_fp8
from unmask.ops.reference.mlp import swiglu


def linear(x: Tensor | Fp8Rows, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """``x`` [.., K] times the transpose of ``weight`` [N, K], plus ``bias`` [N]; returns [.., N]."""
    if isinstance(weight, Fp8Weight):
        return linear_fp8(x, weight, bias)
    assert isinstance(x, Tensor), "rows in 8 bits go with weights in 8 bits"
    return F.linear(x, weight, bias)


def linear_swiglu(x: Tensor | Fp8Rows, weight: Tensor | Fp8Weight) -> Tensor:
    """`swiglu` of the product with ``weight`` [2F, K], gate rows first; returns [.., F]."""
    return swiglu(linear(x, weight))
