"""`drift` and `furthest` of `ops.reference.drift`: what lies between two products of a layer that chooses its rows.

The reference takes 43 operations a layer for the two. Here each is one kernel: a program a row reads both vectors once
and keeps the new one; a row's place among its seat's is counted, not sorted: 512 comparisons of a row of 512.

M rows, seat by seat, S seats, R numbers that are kept of a row, E entries of a plane, N rows of one step of comparing
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SIZE = 16384
"""Of a vector: both are held at once, 64 numbers a thread at 16 warps."""
ELEMENTS_PER_THREAD = 8
"""Of each vector. To be measured."""
BLOCK_M, BLOCK_N = 32, 128
"""Rows of a program that ranks, and rows that it compares them with at a time. To be measured."""
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


def furthest(drift_M: Tensor, optional_M: Tensor, seat_M: Tensor, first_S: Tensor, count_S: Tensor) -> Tensor:
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
            out_M,
            num_rows,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            num_warps=4,
        )
    return out_M


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
    drift = tl.minimum(tl.sum(apart_R * apart_R) / 2, 2.0)
    tl.store(drift_ptr + row, tl.where(a_zero != b_zero, 1.0, drift))
    if KEEP:
        keep = (tl.load(keep_ptr + row) != 0) & (at != 0)
        tl.store(kept_ptr + at * stride_kept + r_R, new_R.to(kept_ptr.dtype.element_ty), mask=mask_R & keep)


@triton.jit
def _unit(x_R: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Of length 1, by its largest number first; and whether it is zero, and stays so."""
    largest = tl.max(tl.abs(x_R))
    x_R = x_R / tl.maximum(largest, TINY)
    return x_R / tl.maximum(tl.sqrt(tl.sum(x_R * x_R)), TINY), largest == 0


@triton.jit(do_not_specialize=["num_rows"])
def _furthest_kernel(
    drift_ptr: tl.tensor,
    optional_ptr: tl.tensor,
    seat_ptr: tl.tensor,
    first_ptr: tl.tensor,
    count_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: some rows, against all rows of the seats that they belong to."""
    m_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here_M = m_M < num_rows
    seat_M = tl.load(seat_ptr + m_M, mask=here_M, other=-1).to(tl.int32)
    key_M, optional_M = _keys(drift_ptr, optional_ptr, m_M, here_M)
    start = tl.load(first_ptr + tl.load(seat_ptr + tl.program_id(0) * BLOCK_M)).to(tl.int32)
    end = tl.load(first_ptr + tl.max(seat_M) + 1).to(tl.int32)
    ahead_M = tl.zeros((BLOCK_M,), tl.int32)
    for at in range(start, end, BLOCK_N):
        n_N = at + tl.arange(0, BLOCK_N)
        there_N = n_N < end
        key_N, _ = _keys(drift_ptr, optional_ptr, n_N, there_N)
        same_MN = seat_M[:, None] == tl.load(seat_ptr + n_N, mask=there_N, other=-2).to(tl.int32)[None, :]
        tie_MN = (key_N[None, :] == key_M[:, None]) & (n_N[None, :] < m_M[:, None])
        ahead_M += tl.sum((same_MN & ((key_N[None, :] > key_M[:, None]) | tie_MN)).to(tl.int32), axis=1)
    count_M = tl.load(count_ptr + seat_M, mask=here_M, other=0)
    tl.store(out_ptr + m_M, optional_M & (ahead_M < count_M), mask=here_M)


@triton.jit
def _keys(
    drift_ptr: tl.tensor, optional_ptr: tl.tensor, m_M: tl.tensor, here_M: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """What rows are ranked by, and which of them may be chosen."""
    optional_M = tl.load(optional_ptr + m_M, mask=here_M, other=0) != 0
    return tl.where(optional_M, tl.load(drift_ptr + m_M, mask=here_M, other=0.0), float("-inf")), optional_M
