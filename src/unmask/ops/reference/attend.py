"""Attention of rows over a seat's entries: a sweep over the canvas plus a short live list.

S seats, Q rows a seat, E entries, N canvas entries, J live entries, H query heads, Hkv key heads, hd head size
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.ops.reference.attention import attention


def attend(
    q_SQ: Tensor,
    k_SE: Tensor,
    v_SE: Tensor,
    *,
    see_SQ: Tensor,
    shadow_SN: Tensor,
    live_SJ: Tensor,
    live_bits_SQJ: Tensor,
) -> Tensor:
    """Rows ``q`` [S, Q, H, hd] over entries ``k``, ``v`` [S, E, Hkv, hd]; returns [S, Q, H, hd].

    A row sees the canvas entries [0, see) that are not shadowed, and the live entries whose bit it holds. A position
    that is live in some other content is shadowed, so each row meets each position once. Rows that see nothing get
    zeros.
    """
    num_canvas = shadow_SN.shape[1]
    pos_N = torch.arange(num_canvas, device=see_SQ.device)
    sweep_SQN = (pos_N < see_SQ[:, :, None]) & ~shadow_SN[:, None, :]
    keys, values = k_SE[:, :num_canvas], v_SE[:, :num_canvas]
    if not live_SJ.shape[1]:
        return attention(q_SQ, keys, values, mask=sweep_SQN)
    index = live_SJ[:, :, None, None].expand(-1, -1, *k_SE.shape[2:])
    keys = torch.cat((keys, k_SE.gather(1, index)), 1)
    values = torch.cat((values, v_SE.gather(1, index)), 1)
    return attention(q_SQ, keys, values, mask=torch.cat((sweep_SQN, live_bits_SQJ), 2))
