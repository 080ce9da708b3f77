"""Attention without a causal order.

B sequences, Q query rows, N keys, H query heads, G = H/Hkv query heads that share a key head
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, see: Tensor | None = None) -> Tensor:
    """Softmax attention of `q` [B, Q, H, hd] over `k`, `v` [B, N, Hkv, hd]; returns [B, Q, H, hd].

    `mask`: bool, broadcastable to [B, Q, N], True where a row may attend.
    `see`: int [B], the rows of sequence b see keys [0, see_b) only. Both together: both must allow.
    A row that sees no key gets zeros.
    """
    allowed = visible_keys(mask, see, k.shape[1])
    if allowed is None:
        return _attend(q, k, v, None)
    # A row without keys is a softmax over nothing: NaN in some kernels, and NaN in every gradient. Such rows see
    # all keys inside the kernel and are zeroed after it.
    blind = ~allowed.any(-1, keepdim=True)  # [B, Q, 1]
    return _attend(q, k, v, allowed | blind).masked_fill(blind.unsqueeze(-1), 0)


def visible_keys(mask: Tensor | None, see: Tensor | None, num_keys: int) -> Tensor | None:
    """`mask` and `see` in one bool [B or 1, Q or 1, N]; None when every row sees every key."""
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(0)
    if see is None:
        return mask
    in_reach = (torch.arange(num_keys, device=see.device) < see.unsqueeze(-1)).unsqueeze(1)
    return in_reach if mask is None else mask & in_reach


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The kernel; `mask` [B or 1, Q or 1, N].

    Without a causal order the query heads that share a key head are just more query rows: [B, Hkv, G*Q, hd]. Keys
    are never repeated, and every kernel can be used, which `enable_gqa` does not allow on all versions of torch.
    """
    (B, Q, H, hd), Hkv = q.shape, k.shape[2]
    group = H // Hkv
    rows = q.view(B, Q, Hkv, group, hd).permute(0, 2, 3, 1, 4).reshape(B, Hkv, group * Q, hd)
    if mask is not None:
        mask = mask.unsqueeze(1)
        if mask.shape[2] > 1 and group > 1:
            mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.view(B, Hkv, group, Q, hd).permute(0, 3, 1, 2, 4).reshape(B, Q, H, hd)
