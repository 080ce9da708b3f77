"""Queries, keys and values of a pass's rows; keys and values go straight to their entries of the pool.

M rows, D hidden size, H query heads, Hkv key heads, hd head size, E entries
"""

from __future__ import annotations

from torch import Tensor

from unmask.ops.reference.fp8 import Fp8Rows, Fp8Weight
from unmask.ops.reference.linear import linear
from unmask.ops.reference.rope import rope


def project_and_store(
    hidden_MD: Tensor | Fp8Rows,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None,
    cos_M: Tensor,
    sin_M: Tensor,
    write_M: Tensor,
    k_E: Tensor,
    v_E: Tensor,
) -> Tensor:
    """Project the normed rows ``hidden`` [M, D], rotate queries and keys, and write K and V to the entries ``write``.

    ``weight`` [(H + 2 Hkv) * hd, D], queries first, then keys, then values, with ``bias`` where the family has one;
    ``cos``, ``sin`` fp32 [M, hd/2] of the rows' positions; ``write`` int64 [M]; ``k``, ``v`` [E, Hkv, hd] of one layer,
    changed in place and cast to their dtype. Returns the rotated queries [M, H, hd]. Rows of padding share entry 0,
    where any of them may win; no other entry is written twice in a pass.
    """
    num_kv_heads, head_dim = k_E.shape[1:]
    heads = linear(hidden_MD, weight, bias).unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q_M, k_M, v_M = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    k_E.index_copy_(0, write_M, rope(k_M, cos_M, sin_M).to(k_E.dtype))
    v_E.index_copy_(0, write_M, v_M.to(v_E.dtype))
    return rope(q_M, cos_M, sin_M)
