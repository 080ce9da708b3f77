"""How far rows have drifted from what is kept of them, and which of a seat's have drifted furthest.

M rows, seat by seat, S seats, R numbers that are kept of a row, E entries of a plane
"""

from __future__ import annotations

import torch
from torch import Tensor


def drift(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor | None = None) -> Tensor:
    """fp32 or wider [M]: `cosine_drift` of each row from its entry ``at`` int64 [M] of a plane.

    Then the plane takes the rows of ``keep`` bool [M], in place; None: it stays. Entries of these are not shared.
    Entry 0 belongs to nobody, and may be written.
    """
    drift_M = cosine_drift(new_MR, kept_ER[at_M])
    if keep_M is not None:
        kept_ER.index_copy_(0, torch.where(keep_M, at_M, 0), new_MR.to(kept_ER.dtype))
    return drift_M


def cosine_drift(new: Tensor, old: Tensor) -> Tensor:
    """1 - cosine of the vectors ``new`` and ``old`` [.., R], fp32 or wider [..]: 0 for equal ones, 2 for opposite ones.

    Two zero vectors have not drifted: 0. One zero vector has no direction: 1.
    """
    a, b = _unit(new), _unit(old)
    # |a - b|^2 = 2 - 2 cos for unit vectors. Unlike 1 - cos it keeps its digits where the cosine is nearly 1.
    out: Tensor = (a - b).square().sum(-1) / 2
    one_zero = a.any(-1) != b.any(-1)
    return out.masked_fill(one_zero, 1.0).clamp(max=2.0)


def _unit(x: Tensor) -> Tensor:
    """fp32 or wider, length 1; a zero vector stays one. By its largest number first: squares may leave the range."""
    wide, tiny = x.to(torch.promote_types(x.dtype, torch.float32)), torch.finfo(torch.float32).tiny
    wide = wide / wide.abs().amax(-1, keepdim=True).clamp(min=tiny)
    length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide / length.clamp(min=tiny)


def furthest(drift_M: Tensor, optional_M: Tensor, seat_M: Tensor, first_S: Tensor, count_S: Tensor) -> Tensor:
    """bool [M]: the ``count`` rows of each seat that drifted most, of the ``optional`` ones; ties to the leftmost.

    Seat s has the rows from ``first[s]`` up to ``first[s + 1]``, int64 [S + 1].
    """
    key_M = torch.where(optional_M, drift_M, -torch.inf)
    order_M = key_M.argsort(descending=True, stable=True)
    order_M = order_M[seat_M[order_M].argsort(stable=True)]
    place_M = (
        torch.arange(len(seat_M), device=seat_M.device) - first_S[seat_M]
    )  # sorted by seat, seats stay as they were
    out_M = torch.zeros_like(optional_M)
    out_M[order_M] = place_M < count_S[seat_M]
    return out_M & optional_M
