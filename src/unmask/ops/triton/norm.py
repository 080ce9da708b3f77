"""`rms_norm` and `add_rms_norm` of `ops.reference.norm`: one program a row, read once.

M rows, D row size, a power of two at least as large in the kernel
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unmask.ops.triton import launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SIZE = 16384
"""Of a row: 32 numbers a thread at the 16 warps of the largest program."""

ELEMENTS_PER_THREAD = 16
"""Two loads of 16 bytes in bf16. To be measured; prediction: at 128 rows of 4096 the time is one trip to memory and
one sum across the program, 2 us with 4 to 16 warps alike; at thousands of rows it is the bytes' time."""


def supported(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> bool:
    """Whether these kernels take the call, from shapes and types alone; ``delta`` is `add_rms_norm`'s.

    No fp64, no two dtypes at once, no gradient.
    """
    tensors = (x, weight) if delta is None else (x, weight, delta)
    wants_grad = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    return (
        x.dtype in DTYPES
        and all(each.dtype == x.dtype for each in tensors)
        and weight.shape == x.shape[-1:]
        and 0 < len(weight) <= MAX_SIZE
        and (delta is None or delta.shape == x.shape)
        and not wants_grad
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None, pdl: bool = False) -> Tensor:
    """As the reference: statistics in fp32, the cast to x's dtype before the gain."""
    out = _like(x)
    _launch(as_rows(x), None, None, weight, out, eps, num_warps, pdl)
    return out


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """As the reference: the sum is rounded to its dtype, and it is the rounded sum that is normed."""
    total, out = _like(x), _like(x)
    _launch(as_rows(x), as_rows(delta), total, weight, out, eps, num_warps, pdl)
    return total, out


def _like(x: Tensor) -> Tensor:
    """Dense, whatever the strides of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def as_rows(x: Tensor) -> Tensor:
    """[M, D] of any leading shape, each row in one piece."""
    rows_MD = x.reshape(-1, x.shape[-1])
    return rows_MD if rows_MD.stride(1) == 1 else rows_MD.contiguous()


def _launch(
    x_MD: Tensor,
    delta_MD: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    out: Tensor,
    eps: float,
    num_warps: int | None,
    pdl: bool,
) -> None:
    num_rows, size = x_MD.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    _norm_kernel[(num_rows,)](
        x_MD,
        delta_MD,
        total,
        weight.contiguous(),
        out,
        x_MD.stride(0),
        0 if delta_MD is None else delta_MD.stride(0),
        size,
        eps,
        ADD=delta_MD is not None,
        BLOCK_D=block,
        PDL=pdl,
        num_warps=num_warps or min(16, max(1, block // (32 * ELEMENTS_PER_THREAD))),
        **launch.options(pdl),
    )


@triton.jit
def _norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    total_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_x: tl.tensor,
    stride_delta: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, BLOCK_D)
    mask_D = d_D < size
    weight_D = tl.load(weight_ptr + d_D, mask=mask_D, other=0.0)  # no kernel of the pass writes it: before the wait
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_D = tl.load(x_ptr + row * stride_x + d_D, mask=mask_D, other=0.0)
    if ADD:
        delta_D = tl.load(delta_ptr + row * stride_delta + d_D, mask=mask_D, other=0.0)
        x_D = (x_D.to(tl.float32) + delta_D.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * size + d_D, x_D, mask=mask_D)
    wide_D = x_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_D * wide_D) / size + eps)
    unit_D = (wide_D * scale).to(x_D.dtype)
    tl.store(out_ptr + row * size + d_D, unit_D.to(tl.float32) * weight_D.to(tl.float32), mask=mask_D)
