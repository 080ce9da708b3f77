"""A forward pass is a list of rows: which tokens, at which positions, written where, seeing what.

S seats, N canvas positions, X scratch columns, E = N + X + 1 columns of a seat, M rows, Q rows a seat in a pass of
fixed shape, J live columns, W slots

A seat's *columns* are its canvas positions, then the scratch columns that a drafter brings, then one for padding, which
is written and never read. A row runs for a column and writes that column's K/V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.core.canvas import Canvas


@dataclass(frozen=True)
class Scratch:
    """Columns that a drafter adds to a pass, and who sees what of them (the live list)."""

    token_SX: Tensor
    pos_SX: Tensor
    valid_SX: Tensor
    """bool: the column runs."""
    live_SJ: Tensor
    """int64: columns of the live list, canvas or scratch."""
    canvas_bits_SJ: Tensor
    """bool: which of them the canvas rows of this pass see."""
    bits_SXJ: Tensor
    """bool: which of them each scratch row sees."""
    shadow_SN: Tensor
    """bool: canvas positions that the sweep leaves out, since the live list has them."""


@dataclass(frozen=True)
class Live:
    """The live list of a pass, by row."""

    column_SJ: Tensor
    bits_MJ: Tensor
    shadow_SN: Tensor


@dataclass(frozen=True)
class RowPlan:
    """One pass: rows seat by seat, columns ascending."""

    token_M: Tensor
    pos_M: Tensor
    seat_M: Tensor
    column_M: Tensor
    see_M: Tensor
    """Rows see the canvas positions [0, see) that are not shadowed."""
    num_rows_S: Tensor
    """Rows of each seat, padding not counted."""
    row_SE: Tensor
    """Row of each column; -1 where it has none."""
    overflow_S: Tensor
    """Rows that a fixed shape had no room for."""
    num_keys: int
    """No row sees further."""
    per_seat: int | None
    """Rows of every seat, padding included, in a pass of fixed shape; None: as many as there are."""
    live: Live | None


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


def pack(
    canvas: Canvas, run_SN: Tensor, see_SN: Tensor, scratch: Scratch | None = None, *, per_seat: int | None = None
) -> RowPlan:
    """The pass that runs the canvas positions ``run`` bool [S, N] and the scratch columns.

    Canvas rows see [0, see) of ``see`` [S, N], scratch rows the whole canvas. Without ``per_seat`` there are as many
    rows as are wanted, which waits for the device; with it every seat has that many, some of them padding.
    """
    padding_S1 = torch.zeros_like(run_SN[:, :1])
    wanted_SE = torch.cat((run_SN, padding_S1) if scratch is None else (run_SN, scratch.valid_SX, padding_S1), 1)
    num_wanted_S = wanted_SE.sum(1)
    if per_seat is None:
        seat_M, column_M = wanted_SE.nonzero(as_tuple=True)
        num_rows_S = num_wanted_S
    else:
        column_SQ, _ = slots(wanted_SE[:, :-1], per_seat)
        seat_M = torch.arange(len(run_SN), device=run_SN.device).repeat_interleave(per_seat)
        column_M, num_rows_S = column_SQ.flatten(), num_wanted_S.clamp(max=per_seat)
    token_SE, pos_SE, see_SE = _columns(canvas, see_SN, scratch)
    see_M = see_SE[seat_M, column_M]
    return RowPlan(
        token_M=token_SE[seat_M, column_M],
        pos_M=pos_SE[seat_M, column_M],
        seat_M=seat_M,
        column_M=column_M,
        see_M=see_M,
        num_rows_S=num_rows_S,
        row_SE=_row_of(wanted_SE, seat_M, column_M),
        overflow_S=num_wanted_S - num_rows_S,
        num_keys=canvas.capacity if per_seat is not None else int(see_M.max()) if len(see_M) else 0,
        per_seat=per_seat,
        live=None if scratch is None else _live(canvas, scratch, seat_M, column_M),
    )


def at_rows(value_SN: Tensor, plan: RowPlan) -> Tensor:
    """bool [M]: a canvas value at each canvas row, False at others."""
    more_S = torch.zeros_like(value_SN[:, :1]).expand(-1, plan.row_SE.shape[1] - value_SN.shape[1])
    return torch.cat((value_SN, more_S), 1)[plan.seat_M, plan.column_M]


def _row_of(wanted_SE: Tensor, seat_M: Tensor, column_M: Tensor) -> Tensor:
    """Row of each column; -1 where it has none. What padding rows scatter goes to the last column."""
    num_seats, num_columns = wanted_SE.shape
    row_E = torch.full((num_seats * num_columns,), -1, dtype=torch.int64, device=wanted_SE.device)
    row_E.scatter_(0, seat_M * num_columns + column_M, torch.arange(len(seat_M), device=wanted_SE.device))
    return torch.where(wanted_SE, row_E.view(num_seats, num_columns), -1)


def _columns(canvas: Canvas, see_SN: Tensor, scratch: Scratch | None) -> tuple[Tensor, Tensor, Tensor]:
    """Token, position and reach of every column; padding is MASK at 0 that sees nothing."""
    pos_SN = canvas.pos_1N().expand_as(see_SN)
    mask_S1, zero_S1 = torch.full_like(pos_SN[:, :1], canvas.mask_token_id), torch.zeros_like(pos_SN[:, :1])
    token, pos, see = [canvas.token_SN], [pos_SN], [see_SN.int()]
    if scratch is not None:
        token.append(scratch.token_SX.int())
        pos.append(scratch.pos_SX.int())
        see.append(torch.where(scratch.valid_SX, canvas.end_S[:, None], 0))
    token_SE, pos_SE, see_SE = (torch.cat(x, 1) for x in ((*token, mask_S1), (*pos, zero_S1), (*see, zero_S1)))
    return token_SE, pos_SE, see_SE


def _live(canvas: Canvas, scratch: Scratch, seat_M: Tensor, column_M: Tensor) -> Live:
    """Kinds of rows, by the bits that they hold: canvas rows, each scratch column, padding."""
    canvas_S1J = scratch.canvas_bits_SJ[:, None]
    bits_SKJ = torch.cat((canvas_S1J, scratch.bits_SXJ, torch.zeros_like(canvas_S1J)), 1)
    kind_M = (column_M - canvas.capacity + 1).clamp(min=0)
    return Live(scratch.live_SJ, bits_SKJ[seat_M, kind_M], scratch.shadow_SN)
