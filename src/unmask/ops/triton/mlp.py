"""`swiglu` of `ops.reference.mlp`: one read of gate and up, one write.

M rows, F MLP size; in the kernel also N columns of a program
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unmask.ops.triton import launch
from unmask.ops.triton.norm import as_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

COLUMNS, NUM_WARPS = 1024, 4
"""One load of 16 bytes of each half a thread in bf16. To be measured; prediction: 128 rows of 12,288 are 1,536 small
programs, 2.3 us if the 9.4 MB came from memory; they are still in the cache."""


def supported(gate_up: Tensor) -> bool:
    """Whether this kernel takes the call: no fp64, no gradient."""
    wants_grad = torch.is_grad_enabled() and gate_up.requires_grad
    return gate_up.dtype in DTYPES and gate_up.shape[-1] > 0 and gate_up.shape[-1] % 2 == 0 and not wants_grad


def swiglu(gate_up: Tensor, *, columns: int = COLUMNS, num_warps: int = NUM_WARPS, pdl: bool = False) -> Tensor:
    """As the reference: silu in fp32, rounded to the dtype before it meets ``up``."""
    rows = as_rows(gate_up)
    num_rows, size = len(rows), gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _swiglu_kernel[(num_rows * triton.cdiv(size, columns),)](
            rows,
            out,
            rows.stride(0),
            size,
            BLOCK_N=columns,
            PDL=pdl,
            num_warps=num_warps,
            **launch.options(pdl),
        )
    return out


@triton.jit
def _swiglu_kernel(
    in_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_in: tl.tensor,
    size: tl.tensor,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parts = tl.cdiv(size, BLOCK_N)
    row = (tl.program_id(0) // parts).to(tl.int64)
    column_N = tl.program_id(0) % parts * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_N = column_N < size
    gate_N = tl.load(in_ptr + row * stride_in + column_N, mask=mask_N, other=0.0)
    up_N = tl.load(in_ptr + row * stride_in + size + column_N, mask=mask_N, other=0.0)
    wide_N = gate_N.to(tl.float32)
    silu_N = (wide_N / (1 + tl.exp(-wide_N))).to(gate_N.dtype)
    tl.store(out_ptr + row * size + column_N, silu_N.to(tl.float32) * up_N.to(tl.float32), mask=mask_N)
