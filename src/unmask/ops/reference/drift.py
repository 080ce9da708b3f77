"""How far rows have drifted from what is kept of them, which of a seat's have drifted furthest, and those packed.

M rows, seat by seat, P packed ones, S seats, R numbers that are kept of a row, E entries of a plane
"""

from __future__ import annotations

from typing import NamedTuple

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

    Two zero vectors have not drifted: 0. One zero vector has no direction: 1. Of numbers that are none it is NaN.
    """
    a, b = _unit(new), _unit(old)
    # |a - b|^2 = 2 - 2 cos for unit vectors. Unlike 1 - cos it keeps its digits where the cosine is nearly 1.
    out: Tensor = (a - b).square().sum(-1) / 2
    one_zero = (a.any(-1) != b.any(-1)) & ~out.isnan()
    return out.masked_fill(one_zero, 1.0).clamp(max=2.0)


def _unit(x: Tensor) -> Tensor:
    """fp32 or wider, length 1; a zero vector stays one. By its largest number first: squares may leave the range."""
    wide, tiny = x.to(torch.promote_types(x.dtype, torch.float32)), torch.finfo(torch.float32).tiny
    wide = wide / wide.abs().amax(-1, keepdim=True).clamp(min=tiny)
    length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide / length.clamp(min=tiny)


def furthest(
    drift_M: Tensor,
    optional_M: Tensor,
    seat_M: Tensor,
    first_S: Tensor,
    count_S: Tensor,
    must_M: Tensor | None = None,
) -> Tensor:
    """bool [M]: the ``count`` rows of each seat that drifted most, of the ``optional`` ones; ties to the leftmost.

    NaN is as far as infinity: what broke is computed anew. Seat s has the rows from ``first[s]`` up to
    ``first[s + 1]``, int64 [S + 1]. Rows of ``must`` bool [M] come on top, and are not counted.
    """
    key_M = torch.where(optional_M, torch.where(drift_M.isnan(), torch.inf, drift_M), -torch.inf)
    order_M = key_M.argsort(descending=True, stable=True)
    order_M = order_M[seat_M[order_M].argsort(stable=True)]  # sorted inside each seat: which rows are whose stays
    place_M = torch.arange(len(seat_M), device=seat_M.device) - first_S[seat_M]
    out_M = torch.zeros_like(optional_M)
    out_M[order_M] = place_M < count_S[seat_M]
    out_M &= optional_M
    return out_M if must_M is None else out_M | must_M


class Picked(NamedTuple):
    """Some rows of a pass of fixed shape, equally many places a seat, padding behind its rows."""

    rows_P: Tensor
    """int64: which rows; of padding the seat's first."""
    seat_P: Tensor
    """int64"""
    write_P: Tensor
    """int64: the rows' entries, 0 of padding."""
    see_P: Tensor
    """int32: how far the rows see, 0 of padding."""
    num_S: Tensor
    """int64: the rows of a seat that are no padding."""


def picked(chosen_M: Tensor, per_seat: int, most: int, write_M: Tensor, see_M: Tensor) -> Picked:
    """The first ``most`` of the rows ``chosen`` bool [M] of each seat, which has ``per_seat`` of the M.

    Their entries come from ``write`` int64 [M], how far they see from ``see`` int32 [M].
    """
    chosen_SQ = chosen_M.view(-1, per_seat)
    place_SP = (~chosen_SQ).int().argsort(dim=1, stable=True)[:, :most]
    valid_SP = chosen_SQ.gather(1, place_SP)
    seat_SP = torch.arange(len(chosen_SQ), device=chosen_M.device)[:, None].expand_as(place_SP)
    rows_P = (seat_SP * per_seat + torch.where(valid_SP, place_SP, 0)).flatten()
    write_P, see_P = (torch.where(valid_SP.flatten(), each_M[rows_P], 0) for each_M in (write_M, see_M))
    return Picked(rows_P, seat_SP.flatten(), write_P, see_P, valid_SP.sum(1))
