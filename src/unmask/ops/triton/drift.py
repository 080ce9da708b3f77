"""`drift`, `furthest` and `picked` of `ops.reference.drift`: what lies between two products of a layer that chooses its
rows.

The reference takes some 60 operations a layer for the three. Here each is one kernel: a program a row reads both
vectors once and keeps the new one; a row's place among its seat's is counted, not sorted: 512 comparisons of a row of
512; a program a seat packs what was chosen.

M rows, seat by seat, P packed ones, S seats, R numbers that are kept of a row, E entries of a plane, N rows of one step
of comparing, Q rows of one step of packing
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unmask.ops.reference.drift import Picked

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SIZE = 16384
"""Of a vector: both are held at once, 64 numbers a thread at 16 warps."""
ELEMENTS_PER_THREAD = 8
"""Of each vector. To be measured."""
BLOCK_M, BLOCK_N = 32, 128
"""Rows of a program that ranks, and rows that it compares them with at a time. To be measured."""
MAX_STEP = 1024
"""Rows that are packed at a time."""
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def supported(new_MR: Tensor, kept_ER: Tensor) -> bool:
    """Whether these kernels take the call, from shapes and types alone. No fp64."""
    fits = 0 < new_MR.shape[1] == kept_ER.shape[1] <= MAX_SIZE
    dense = all(x.stride(1) == 1 for x in (new_MR, kept_ER))
    return fits and dense and all(x.dtype in DTYPES for x in (new_MR, kept_ER))


def drift(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor | None = None) -> Tensor:
    """As the reference, in fp32; entry 0 is not written."""
    num_rows, size = new_MR.shape
    drift_M = torch.empty(num_rows, dtype=torch.float32, device=new_MR.device)
    if num_rows == 0:
        return drift_M
    block = triton.next_power_of_2(size)
    _drift_kernel[(num_rows,)](
        new_MR,
        kept_ER,
        at_M,
        keep_M,
        drift_M,
        new_MR.stride(0),
        kept_ER.stride(0),
        size,
        KEEP=keep_M is not None,
        BLOCK_R=block,
        num_warps=min(16, max(1, block // (32 * ELEMENTS_PER_THREAD))),
    )
    return drift_M


def furthest(
    drift_M: Tensor,
    optional_M: Tensor,
    seat_M: Tensor,
    first_S: Tensor,
    count_S: Tensor,
    must_M: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    out_M = torch.empty_like(optional_M)
    num_rows = len(drift_M)
    if num_rows:
        grid = (triton.cdiv(num_rows, BLOCK_M),)
        _furthest_kernel[grid](
            drift_M,
            optional_M,
            seat_M,
            first_S,
            count_S,
            must_M,
            out_M,
            num_rows,
            MUST=must_M is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            num_warps=4,
        )
    return out_M


def picked(chosen_M: Tensor, per_seat: int, most: int, write_M: Tensor, see_M: Tensor) -> Picked:
    """As the reference."""
    num_seats, device = len(chosen_M) // per_seat, chosen_M.device
    rows_P, seat_P, write_P = (torch.empty(num_seats * most, dtype=torch.int64, device=device) for _ in range(3))
    see_P = torch.empty(num_seats * most, dtype=see_M.dtype, device=device)
    num_S = torch.empty(num_seats, dtype=torch.int64, device=device)
    if num_seats:
        _picked_kernel[(num_seats,)](
            chosen_M,
            write_M,
            see_M,
            rows_P,
            seat_P,
            write_P,
            see_P,
            num_S,
            per_seat,
            most,
            BLOCK_Q=min(MAX_STEP, triton.next_power_of_2(per_seat)),
            num_warps=4,
        )
    return Picked(rows_P, seat_P, write_P, see_P, num_S)


@triton.jit
def _drift_kernel(
    new_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    at_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    drift_ptr: tl.tensor,
    stride_new: tl.tensor,
    stride_kept: tl.tensor,
    size: tl.tensor,
    KEEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    r_R = tl.arange(0, BLOCK_R)
    mask_R = r_R < size
    at = tl.load(at_ptr + row).to(tl.int64)
    new_R = tl.load(new_ptr + row * stride_new + r_R, mask=mask_R, other=0.0)
    old_R = tl.load(kept_ptr + at * stride_kept + r_R, mask=mask_R, other=0.0)
    a_R, a_zero = _unit(new_R.to(tl.float32))
    b_R, b_zero = _unit(old_R.to(tl.float32))
    apart_R = a_R - b_R
    drift = tl.minimum(tl.sum(apart_R * apart_R) / 2, 2.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(drift_ptr + row, tl.where((a_zero != b_zero) & (drift == drift), 1.0, drift))
    if KEEP:
        keep = (tl.load(keep_ptr + row) != 0) & (at != 0)
        tl.store(kept_ptr + at * stride_kept + r_R, new_R.to(kept_ptr.dtype.element_ty), mask=mask_R & keep)


@triton.jit
def _unit(x_R: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Of length 1, by its largest number first; and whether it is zero, and stays so."""
    largest = tl.max(tl.abs(x_R))
    x_R = x_R / tl.maximum(largest, TINY)
    square = tl.sum(x_R * x_R)  # NaN if a number is, which the largest is not
    # Rounded by itself: any other division may be fused with the difference that follows, of one side only, and then
    # equal vectors are 1e-15 apart, no tie any more.
    return tl.div_rn(x_R, tl.zeros_like(x_R) + tl.maximum(tl.sqrt(square), TINY)), square == 0


@triton.jit(do_not_specialize=["num_rows"])
def _furthest_kernel(
    drift_ptr: tl.tensor,
    optional_ptr: tl.tensor,
    seat_ptr: tl.tensor,
    first_ptr: tl.tensor,
    count_ptr: tl.tensor,
    must_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    MUST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: some rows, against all rows of the seats that they belong to."""
    m_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here_M = m_M < num_rows
    seat_M = tl.load(seat_ptr + m_M, mask=here_M, other=0)
    start_M = tl.load(first_ptr + seat_M, mask=here_M, other=0).to(tl.int32)
    end_M = tl.load(first_ptr + seat_M + 1, mask=here_M, other=0).to(tl.int32)
    key_M, optional_M = _keys(drift_ptr, optional_ptr, m_M, here_M)
    end = tl.max(end_M)
    ahead_M = tl.zeros((BLOCK_M,), tl.int32)
    for at in range(tl.min(tl.where(here_M, start_M, end)), end, BLOCK_N):
        n_N = at + tl.arange(0, BLOCK_N)
        key_N, _ = _keys(drift_ptr, optional_ptr, n_N, n_N < end)
        # The ranked rows along the lanes: along the registers every thread would load all of them, 168 and not 10.
        same_NM = (n_N[:, None] >= start_M[None, :]) & (n_N[:, None] < end_M[None, :])
        tie_NM = (key_N[:, None] == key_M[None, :]) & (n_N[:, None] < m_M[None, :])
        ahead_M += tl.sum((same_NM & ((key_N[:, None] > key_M[None, :]) | tie_NM)).to(tl.int32), axis=0)
    out_M = optional_M & (ahead_M < tl.load(count_ptr + seat_M, mask=here_M, other=0))
    if MUST:
        out_M |= tl.load(must_ptr + m_M, mask=here_M, other=0) != 0
    tl.store(out_ptr + m_M, out_M, mask=here_M)


@triton.jit
def _keys(
    drift_ptr: tl.tensor, optional_ptr: tl.tensor, m_M: tl.tensor, here_M: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """What rows are ranked by, and which of them may be chosen."""
    optional_M = tl.load(optional_ptr + m_M, mask=here_M, other=0) != 0
    drift_M = tl.load(drift_ptr + m_M, mask=here_M, other=0.0)
    drift_M = tl.where(drift_M == drift_M, drift_M, float("inf"))
    return tl.where(optional_M, drift_M, float("-inf")), optional_M


@triton.jit(do_not_specialize=["per_seat", "most"])
def _picked_kernel(
    chosen_ptr: tl.tensor,
    write_ptr: tl.tensor,
    see_ptr: tl.tensor,
    out_rows_ptr: tl.tensor,
    out_seat_ptr: tl.tensor,
    out_write_ptr: tl.tensor,
    out_see_ptr: tl.tensor,
    out_num_ptr: tl.tensor,
    per_seat: tl.tensor,
    most: tl.tensor,
    BLOCK_Q: tl.constexpr,
) -> None:
    """One program: a seat."""
    seat = tl.program_id(0)
    first, first_out = seat * per_seat, seat * most
    num = 0
    for at in range(0, per_seat, BLOCK_Q):
        q_Q = at + tl.arange(0, BLOCK_Q)
        chosen_Q = (tl.load(chosen_ptr + first + q_Q, mask=q_Q < per_seat, other=0) != 0).to(tl.int32)
        place_Q = num + tl.cumsum(chosen_Q, 0) - 1
        taken_Q = (chosen_Q != 0) & (place_Q < most)
        tl.store(out_rows_ptr + first_out + place_Q, first + q_Q, mask=taken_Q)
        tl.store(out_write_ptr + first_out + place_Q, tl.load(write_ptr + first + q_Q, mask=taken_Q), mask=taken_Q)
        tl.store(out_see_ptr + first_out + place_Q, tl.load(see_ptr + first + q_Q, mask=taken_Q), mask=taken_Q)
        num += tl.sum(chosen_Q)
    num = tl.minimum(num, most)
    tl.store(out_num_ptr + seat, num)
    for at in range(0, most, BLOCK_Q):
        p_Q = at + tl.arange(0, BLOCK_Q)
        padding_Q = (p_Q >= num) & (p_Q < most)
        tl.store(out_seat_ptr + first_out + p_Q, seat, mask=p_Q < most)
        tl.store(out_rows_ptr + first_out + p_Q, first, mask=padding_Q)
        tl.store(out_write_ptr + first_out + p_Q, 0, mask=padding_Q)
        tl.store(out_see_ptr + first_out + p_Q, 0, mask=padding_Q)
