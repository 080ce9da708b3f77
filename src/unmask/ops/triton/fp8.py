"""`quantize_rows` and `linear_fp8` of `ops.reference.fp8`: kernels that quantise, alone or behind a norm or the gated
activation, and the library's product.

A row's scale is known once its last column is, so a program takes a whole row and keeps it in registers: it is read
once, and the 8-bit row is all that is written. Behind a norm, the normed row never is in memory in 16 bits.

M rows, D row size, F MLP size, N output channels; in the kernels BLOCK is a power of two at least as large as a row
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from unmask.ops.reference.fp8 import LARGEST, SMALLEST, Fp8Rows, Fp8Weight
from unmask.ops.triton import launch, linear
from unmask.ops.triton.norm import as_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_COLUMNS = 32_768
"""Of a row that a program keeps in registers: 64 values a thread of 16 warps."""
ELEMENTS_PER_THREAD = 16
"""Two loads of 16 bytes in bf16. To be measured; prediction: as the norm without it, one trip to memory and two sums
across the program, 2.3 us at 128 rows of 4096."""


def supported(x: Tensor) -> bool:
    """Whether the kernels quantise these rows: no fp64, no row too long; for `swiglu` [.., 2F] it is F that counts."""
    return x.dtype in DTYPES and 0 < x.shape[-1] <= MOST_COLUMNS


def product_supported(dtype: torch.dtype, weight: Fp8Weight) -> bool:
    """Whether the library multiplies this: it takes sizes in multiples of 16 and gives bf16 where both factors have
    scales, on the GPUs and versions where its scales by row work at all."""
    device = weight.value_ND.device
    return (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and all(size % 16 == 0 for size in weight.shape)
        and _library_scales_rows(device)
    )


@lru_cache
def _library_scales_rows(device: torch.device) -> bool:
    """Tried once: Ada needs torch 2.7, some Blackwells a newer cuBLAS, and no attribute tells."""
    value_MD = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
    one_M = torch.ones(16, device=device)
    try:
        product(value_MD, one_M, Fp8Weight(value_MD, one_M), None)
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def linear_fp8(x: Tensor | Fp8Rows, weight: Fp8Weight, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """As the reference, but for the sum: the tensor cores keep fewer than fp32's bits of it."""
    value, scale = (x.value, x.scale) if isinstance(x, Fp8Rows) else quantize_rows(x, pdl=pdl)
    return product(value, scale, weight, bias)


def product(value: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Quantised rows, value [.., D] and scale [..], times the weight, plus the bias; returns bf16 [.., N].

    Where our kernel has been measured to be faster it is ours, else the library's.
    """
    value_MD = value.reshape(-1, value.shape[-1])
    if len(value_MD) == 0:
        return torch.empty(*value.shape[:-1], len(weight), dtype=torch.bfloat16, device=value.device)
    tile = linear.faster_fp8(len(value_MD), weight)
    if tile is not None:
        out_MN = linear.linear_fp8(value_MD, scale.reshape(-1), weight, bias, tile=tile)
        return out_MN.reshape(*value.shape[:-1], len(weight))
    out_MN = torch._scaled_mm(
        value_MD,
        weight.value_ND.t(),
        scale_a=scale.reshape(-1, 1),
        scale_b=weight.scale_N.reshape(1, -1),
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out_MN.reshape(*value.shape[:-1], len(weight))


def quantize_rows(x: Tensor, *, num_warps: int | None = None, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """As the reference, bit for bit; leading dimensions stay: value [.., D] and scale [..]."""
    value, scale = _room(x, x.shape[-1])
    _launch_norm(as_rows(x), None, None, None, value, scale, 0.0, x.dtype, num_warps, pdl)
    return value, scale


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of the normed rows, which are rounded in between as if they were written."""
    value, scale = _room(x, x.shape[-1])
    dtype = torch.promote_types(x.dtype, weight.dtype)
    _launch_norm(as_rows(x), None, None, weight, value, scale, eps, dtype, num_warps, pdl)
    return value, scale


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, rounded to its dtype, and the value and scale of its normed rows."""
    dtype = torch.promote_types(x.dtype, delta.dtype)
    total = torch.empty(x.shape, dtype=dtype, device=x.device)
    value, scale = _room(x, x.shape[-1])
    wide = torch.promote_types(dtype, weight.dtype)
    _launch_norm(as_rows(x), as_rows(delta), total, weight, value, scale, eps, wide, num_warps, pdl)
    return total, value, scale


def swiglu(gate_up: Tensor, *, num_warps: int | None = None, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of silu(gate) * up, which is rounded in between as if it were written."""
    rows, size = as_rows(gate_up), gate_up.shape[-1] // 2
    value, scale = _room(gate_up, size)
    if value.numel():
        block = triton.next_power_of_2(size)
        _swiglu_fp8_kernel[(len(rows),)](
            rows,
            value,
            scale,
            rows.stride(0),
            size,
            LARGEST=LARGEST,
            SMALLEST=SMALLEST,
            BLOCK=block,
            PDL=pdl,
            num_warps=num_warps or _num_warps(block, most=32),
            **launch.options(pdl),
        )
    return value, scale


def _room(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    value = torch.empty((*x.shape[:-1], size), dtype=torch.float8_e4m3fn, device=x.device)
    return value, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _num_warps(block: int, most: int) -> int:
    return min(most, max(1, block // (32 * ELEMENTS_PER_THREAD)))


NORMED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _launch_norm(
    x_MD: Tensor,
    delta_MD: Tensor | None,
    total: Tensor | None,
    weight: Tensor | None,
    value: Tensor,
    scale: Tensor,
    eps: float,
    normed: torch.dtype,
    num_warps: int | None,
    pdl: bool,
) -> None:
    num_rows, size = x_MD.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    _norm_fp8_kernel[(num_rows,)](
        x_MD,
        delta_MD,
        total,
        None if weight is None else weight.contiguous(),
        value,
        scale,
        x_MD.stride(0),
        0 if delta_MD is None else delta_MD.stride(0),
        size,
        eps,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST,
        NORM=weight is not None,
        ADD=delta_MD is not None,
        NORMED=NORMED[normed],
        BLOCK=block,
        PDL=pdl,
        num_warps=num_warps or _num_warps(block, most=16),
        **launch.options(pdl),
    )


@triton.jit
def _norm_fp8_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    total_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    value_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    stride_x: tl.tensor,
    stride_delta: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, BLOCK)
    mask_D = d_D < size
    if NORM:
        weight_D = tl.load(weight_ptr + d_D, mask=mask_D, other=0.0)  # no kernel of the pass writes it
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_D = tl.load(x_ptr + row * stride_x + d_D, mask=mask_D, other=0.0)
    if ADD:
        delta_D = tl.load(delta_ptr + row * stride_delta + d_D, mask=mask_D, other=0.0)
        x_D = (x_D.to(tl.float32) + delta_D.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * size + d_D, x_D, mask=mask_D)
    wide_D = x_D.to(tl.float32)
    if NORM:
        unit = tl.rsqrt(tl.sum(wide_D * wide_D) / size + eps)
        unit_D = (wide_D * unit).to(x_D.dtype).to(tl.float32)
        wide_D = (unit_D * weight_D.to(tl.float32)).to(NORMED).to(tl.float32)
    _store_row(wide_D, value_ptr + row * size + d_D, scale_ptr + row, mask_D, LARGEST, SMALLEST)


@triton.jit
def _swiglu_fp8_kernel(
    in_ptr: tl.tensor,
    value_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    stride_in: tl.tensor,
    size: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column_F = tl.arange(0, BLOCK)
    mask_F = column_F < size
    gate_F = tl.load(in_ptr + row * stride_in + column_F, mask=mask_F, other=0.0)
    up_F = tl.load(in_ptr + row * stride_in + size + column_F, mask=mask_F, other=0.0)
    wide_F = gate_F.to(tl.float32)
    silu_F = (wide_F / (1 + tl.exp(-wide_F))).to(gate_F.dtype)
    out_F = (silu_F.to(tl.float32) * up_F.to(tl.float32)).to(gate_F.dtype)
    _store_row(out_F.to(tl.float32), value_ptr + row * size + column_F, scale_ptr + row, mask_F, LARGEST, SMALLEST)


@triton.jit
def _store_row(
    wide_D: tl.tensor,
    value_ptr_D: tl.tensor,
    scale_ptr: tl.tensor,
    mask_D: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    """Divisions are rounded as the reference rounds them: they are one a row."""
    most = tl.maximum(tl.max(tl.abs(wide_D)), SMALLEST)
    largest = tl.zeros_like(most) + LARGEST
    tl.store(scale_ptr, tl.div_rn(most, largest))
    tl.store(value_ptr_D, (wide_D * tl.div_rn(largest, most)).to(tl.float8e4nv), mask=mask_D)
