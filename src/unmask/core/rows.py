"""A forward pass is a list of rows: which tokens, at which positions, of which seats.

S seats, N positions, M rows, C scored positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unmask.core.canvas import Canvas


@dataclass(frozen=True)
class RowPlan:
    """One pass, ragged: rows seat by seat, positions ascending."""

    token_M: Tensor
    pos_M: Tensor
    seat_M: Tensor
    """Number of the row's seat among the seats of this pass (not its place in the batch)."""
    see_S: Tensor
    """Rows of seat s of this pass see its positions [0, see_s)."""
    width: int
    """Longest visible canvas of this pass."""
    row_SN: Tensor
    """Row of every canvas position; -1 where it has none."""
    num_rows_S: Tensor
    """Rows by place in the batch."""


def pack(canvas: Canvas, recompute_SN: Tensor) -> RowPlan:
    """Rows for the positions ``recompute`` bool [S, N]. Waits for the device: for eager passes."""
    seat_M, pos_M = recompute_SN.nonzero(as_tuple=True)
    num_rows_S = recompute_SN.sum(1)
    used_S = num_rows_S > 0
    number_S = used_S.cumsum(0) - 1
    see_S = canvas.end_S[used_S]
    row_SN = (recompute_SN.flatten().cumsum(0) - 1).view_as(recompute_SN).masked_fill(~recompute_SN, -1)
    return RowPlan(
        token_M=canvas.token_SN[seat_M, pos_M],
        pos_M=pos_M,
        seat_M=number_S[seat_M],
        see_S=see_S,
        width=int(see_S.max()) if see_S.numel() else 0,
        row_SN=row_SN,
        num_rows_S=num_rows_S,
    )
