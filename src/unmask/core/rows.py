"""A forward pass is a list of rows: which tokens, at which positions, of which seats.

S seats, N positions, M rows, C scored positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
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


def slots(wanted_SN: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The wanted positions of each seat, ascending, in ``width`` slots: int64 [S, width], N where a slot is empty.

    Also how many did not fit, [S]. No value leaves the device, so this can be captured.
    """
    num_seats, capacity = wanted_SN.shape
    place_SN = wanted_SN.cumsum(1) - 1
    place_SN = torch.where(wanted_SN & (place_SN < width), place_SN, width)
    pos_SN = torch.arange(capacity, device=wanted_SN.device).expand(num_seats, capacity)
    out = torch.full((num_seats, width + 1), capacity, dtype=torch.int64, device=wanted_SN.device)
    out = out.scatter_(1, place_SN, pos_SN)[:, :width]
    return out, (wanted_SN.sum(1) - width).clamp(min=0)


def spread(value_SW: Tensor, pos_SW: Tensor, valid_SW: Tensor, capacity: int) -> Tensor:
    """Columns back on the canvas: [S, N] with the values at their positions where valid, zero elsewhere."""
    out = torch.zeros(len(pos_SW), capacity + 1, dtype=value_SW.dtype, device=value_SW.device)
    return out.scatter_(1, torch.where(valid_SW, pos_SW, capacity), value_SW)[:, :capacity]


@dataclass(frozen=True)
class FixedPlan:
    """One pass of fixed shape: Q rows a seat, of which some are padding. Entries are places in a seat's dense cache:
    the canvas, then scratch, then one entry that is written and never read."""

    token_SQ: Tensor
    pos_SQ: Tensor
    write_SQ: Tensor
    """Entry that takes the row's K/V."""
    see_SQ: Tensor
    """Rows see canvas entries [0, see) that are not shadowed."""
    valid_SQ: Tensor
    live_SJ: Tensor
    """Entries of the live list."""
    live_bits_SQJ: Tensor
    """bool: which of them each row sees."""
    shadow_SN: Tensor
    """bool: canvas entries that the sweep leaves out, since the live list has that position."""


def canvas_rows(canvas: Canvas, recompute_SN: Tensor, see_SN: Tensor, num_rows: int, trash: int) -> FixedPlan:
    """Rows for the positions ``recompute``, each writing its own canvas entry; nothing is live."""
    slot_SQ, _ = slots(recompute_SN, num_rows)
    valid_SQ = slot_SQ < canvas.capacity
    pos_SQ = slot_SQ.clamp(max=canvas.capacity - 1)
    nothing = torch.zeros(*pos_SQ.shape, 0, dtype=torch.bool, device=pos_SQ.device)
    return FixedPlan(
        token_SQ=canvas.token_SN.gather(1, pos_SQ),
        pos_SQ=pos_SQ,
        write_SQ=torch.where(valid_SQ, pos_SQ, trash),
        see_SQ=torch.where(valid_SQ, see_SN.gather(1, pos_SQ), 0),
        valid_SQ=valid_SQ,
        live_SJ=pos_SQ[:, :0],
        live_bits_SQJ=nothing,
        shadow_SN=torch.zeros_like(recompute_SN),
    )


def join(plan: FixedPlan, scratch: FixedPlan) -> FixedPlan:
    """Two parts of one pass. The second brings live list and shadow; its bits cover the rows of both parts."""

    def both(name: str) -> Tensor:
        return torch.cat((getattr(plan, name), getattr(scratch, name)), 1)

    return replace(scratch, **{name: both(name) for name in ("token_SQ", "pos_SQ", "write_SQ", "see_SQ", "valid_SQ")})
