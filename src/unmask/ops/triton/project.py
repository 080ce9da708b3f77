"""`project_and_store` of `ops.reference.project`, in two ways: few rows in one kernel, more by the library's product.

At few rows a step reads weights and does little else, and every kernel more costs its launch and its drain, 2 to 3 us
beside a product of 28. One kernel then projects, rotates and stores; keys and values are never in memory before they
are in the pool. With more rows the library's product is the faster one, and a second kernel rotates and stores what
it left.

M rows, D hidden size, H query heads, Hkv key heads, hd head size, E entries; in the kernels also P pairs: dimension i
of a head and i + hd/2, which turn together
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from unmask.ops.triton import launch
from unmask.ops.triton.linear import (
    Tile,
    accumulate,
    before_the_wait,
    blocks_of,
    fit,
    fits_descriptor,
    prefetched,
    sources,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

FUSED_ROWS = 32
FUSED_SHAPES = ((12288, 4096),)
"""Most rows, and the weights, with which the one kernel was measured to win: LLaDA-8B's on an H200 in 27.3 us at 32
rows, the library's product and a kernel behind it 29.5. At 128 rows it is 32.3 for 32.7, and beside products that read
the cache it loses (docs/kernels.md)."""

TILES: dict[int, Tile] = {
    64: Tile(width=64, depth=128, num_warps=4, num_stages=5),
    192: Tile(width=64, depth=64, num_warps=8, num_stages=5),
}
"""The first with enough rows is taken; `width` counts pairs, so a program reads twice as many weight rows."""


@dataclass(frozen=True)
class Spread:
    """How rotating and storing is cut into programs."""

    rows: int
    heads: int
    """Most heads of a program, which share its cosines and sines; fewer where they do not divide H and Hkv."""
    num_warps: int = 4


FEW_ROWS, MANY_ROWS = Spread(rows=16, heads=1), Spread(rows=16, heads=4)
"""Below and from 512 rows. To be measured; prediction: one head a program fills the chip from 16 rows on; where bytes
count, four heads read a quarter of the cosines and sines, else as many bytes as the heads themselves."""


def supported(hidden_MD: Tensor, k_E: Tensor, v_E: Tensor) -> bool:
    """Whether these kernels take the call: no fp64, heads of even size that lie in one piece."""
    pieces = all(x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] for x in (k_E, v_E))
    return hidden_MD.dtype in DTYPES and pieces and k_E.shape[-1] % 2 == 0


def project_and_store(
    hidden_MD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos_M: Tensor,
    sin_M: Tensor,
    write_M: Tensor,
    k_E: Tensor,
    v_E: Tensor,
) -> Tensor:
    """As the reference. The one kernel rotates before it rounds to the dtype of the rows, the reference after."""
    few = len(hidden_MD) <= FUSED_ROWS and tuple(weight.shape) in FUSED_SHAPES
    way = fused if few else by_library
    return way(hidden_MD, weight, bias, cos_M, sin_M, write_M, k_E, v_E)


def by_library(
    hidden_MD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos_M: Tensor,
    sin_M: Tensor,
    write_M: Tensor,
    k_E: Tensor,
    v_E: Tensor,
    *,
    spread: Spread | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """The library's product, then one kernel that rotates and stores.

    ``pdl`` is `launch.early`; None: where the device can.
    """
    qkv_M = F.linear(hidden_MD, weight, bias)
    return rotate_and_store(qkv_M, cos_M, sin_M, write_M, k_E, v_E, spread=spread, pdl=pdl)


def rotate_and_store(
    qkv_M: Tensor,
    cos_M: Tensor,
    sin_M: Tensor,
    write_M: Tensor,
    k_E: Tensor,
    v_E: Tensor,
    *,
    spread: Spread | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Rotated queries [M, H, hd] of the projected rows [M, (H + 2 Hkv) * hd]; keys and values go to their entries."""
    num_rows, (num_kv_heads, head_dim) = len(qkv_M), k_E.shape[1:]
    pdl = launch.early(qkv_M.device) if pdl is None else pdl
    num_heads = qkv_M.shape[1] // head_dim - 2 * num_kv_heads
    q_M = qkv_M.new_empty(num_rows, num_heads, head_dim)
    if num_rows == 0:
        return q_M
    spread = spread or (FEW_ROWS if num_rows < 512 else MANY_ROWS)
    heads = spread.heads
    while num_heads % heads or num_kv_heads % heads:
        heads //= 2
    grid = ((num_heads + 2 * num_kv_heads) // heads, triton.cdiv(num_rows, spread.rows))
    _rotate_kernel[grid](
        qkv_M,
        q_M,
        k_E,
        v_E,
        cos_M.contiguous(),
        sin_M.contiguous(),
        write_M,
        num_rows,
        num_heads,
        num_kv_heads,
        qkv_M.stride(0),
        k_E.stride(0),
        v_E.stride(0),
        HALF=head_dim // 2,
        BLOCK_P=triton.next_power_of_2(head_dim // 2),
        BLOCK_M=spread.rows,
        HEADS=heads,
        PDL=pdl,
        num_warps=spread.num_warps,
        **launch.options(pdl),
    )
    return q_M


def fused(
    hidden_MD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos_M: Tensor,
    sin_M: Tensor,
    write_M: Tensor,
    k_E: Tensor,
    v_E: Tensor,
    *,
    tile: Tile | None = None,
    pdl: bool = False,
) -> Tensor:
    """Everything in one kernel. Rotation and bias are added to the sums in fp32; what is stored is rounded once.

    ``pdl`` as in `ops.triton.linear.linear`.
    """
    (num_rows, hidden_size), (num_kv_heads, head_dim) = hidden_MD.shape, k_E.shape[1:]
    all_heads = len(weight) // head_dim
    num_heads = all_heads - 2 * num_kv_heads
    q_M = hidden_MD.new_empty(num_rows, num_heads, head_dim)
    if num_rows == 0:
        return q_M
    if hidden_MD.stride(1) != 1:
        hidden_MD = hidden_MD.contiguous()
    weight = weight.contiguous()
    tile = tile or next((tile for most, tile in TILES.items() if most >= num_rows), TILES[max(TILES)])
    pairs = min(tile.width, max(16, triton.next_power_of_2(head_dim // 2)))
    tile = replace(tile, width=pairs, strips=1, splits=1, tma=tile.tma and fits_descriptor(hidden_MD, weight))
    blocks = blocks_of(num_rows)
    tile = fit(tile, sum(blocks), 2, hidden_MD.dtype, hidden_MD.device)
    grid = triton.cdiv(num_rows, sum(blocks)) * all_heads * triton.cdiv(head_dim // 2, pairs)
    x_1, x_2, weights = sources(hidden_MD, weight, tile, blocks)
    _fused_kernel[(grid,)](
        x_1,
        x_2,
        weights,
        weight,
        bias,
        cos_M.contiguous(),
        sin_M.contiguous(),
        write_M,
        q_M,
        k_E,
        v_E,
        num_rows,
        num_heads,
        num_kv_heads,
        len(weight),
        hidden_MD.stride(0),
        k_E.stride(0),
        v_E.stride(0),
        prefetched(tile, weight),
        D=hidden_size,
        HALF=head_dim // 2,
        BIAS=bias is not None,
        EXACT=hidden_MD.dtype == torch.float32,
        BLOCK_M=blocks[0],
        REST_M=blocks[1],
        BLOCK_P=pairs,
        BLOCK_D=tile.depth,
        SWAP=tile.swap,
        TMA=tile.tma,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch.options(pdl),
    )
    return q_M


@triton.jit
def _rotate_kernel(
    qkv_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    write_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    stride_qkv: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: HEADS heads of one kind, BLOCK_M rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * HEADS
    row_M = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair_P = tl.arange(0, BLOCK_P)
    mask_MP = (row_M < num_rows)[:, None] & (pair_P < HALF)[None, :]
    in_ptr_MP = qkv_ptr + row_M[:, None] * stride_qkv + pair_P[None, :]
    if first < num_heads:
        at_MP = row_M[:, None] * (num_heads * 2 * HALF) + pair_P[None, :]
        cos_MP = tl.load(cos_ptr + row_M[:, None] * HALF + pair_P[None, :], mask=mask_MP, other=0.0)
        sin_MP = tl.load(sin_ptr + row_M[:, None] * HALF + pair_P[None, :], mask=mask_MP, other=0.0)
        for i in tl.static_range(HEADS):
            low_MP = tl.load(in_ptr_MP + (first + i) * 2 * HALF, mask=mask_MP, other=0.0)
            high_MP = tl.load(in_ptr_MP + (first + i) * 2 * HALF + HALF, mask=mask_MP, other=0.0)
            _store_turned(q_ptr + at_MP + (first + i) * 2 * HALF, low_MP, high_MP, cos_MP, sin_MP, mask_MP, HALF)
    elif first < num_heads + num_kv_heads:
        entry_M = tl.load(write_ptr + row_M, mask=row_M < num_rows, other=0)
        at_MP = entry_M[:, None] * stride_k + pair_P[None, :]
        cos_MP = tl.load(cos_ptr + row_M[:, None] * HALF + pair_P[None, :], mask=mask_MP, other=0.0)
        sin_MP = tl.load(sin_ptr + row_M[:, None] * HALF + pair_P[None, :], mask=mask_MP, other=0.0)
        for i in tl.static_range(HEADS):
            low_MP = tl.load(in_ptr_MP + (first + i) * 2 * HALF, mask=mask_MP, other=0.0)
            high_MP = tl.load(in_ptr_MP + (first + i) * 2 * HALF + HALF, mask=mask_MP, other=0.0)
            head = first + i - num_heads
            _store_turned(k_ptr + at_MP + head * 2 * HALF, low_MP, high_MP, cos_MP, sin_MP, mask_MP, HALF)
    else:
        entry_M = tl.load(write_ptr + row_M, mask=row_M < num_rows, other=0)
        at_MP = entry_M[:, None] * stride_v + pair_P[None, :]
        for i in tl.static_range(HEADS):
            low_MP = tl.load(in_ptr_MP + (first + i) * 2 * HALF, mask=mask_MP, other=0.0)
            high_MP = tl.load(in_ptr_MP + (first + i) * 2 * HALF + HALF, mask=mask_MP, other=0.0)
            head = first + i - num_heads - num_kv_heads
            tl.store(v_ptr + at_MP + head * 2 * HALF, low_MP, mask=mask_MP)
            tl.store(v_ptr + at_MP + head * 2 * HALF + HALF, high_MP, mask=mask_MP)


@triton.jit
def _store_turned(
    out_ptr_MP: tl.tensor,
    low_MP: tl.tensor,
    high_MP: tl.tensor,
    cos_MP: tl.tensor,
    sin_MP: tl.tensor,
    mask_MP: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Rotate in fp32, round to the dtype that the halves came in, then to the one they are kept in."""
    wide_low_MP, wide_high_MP = low_MP.to(tl.float32), high_MP.to(tl.float32)
    turned_low_MP = wide_low_MP * cos_MP - wide_high_MP * sin_MP
    turned_high_MP = wide_high_MP * cos_MP + wide_low_MP * sin_MP
    tl.store(out_ptr_MP, turned_low_MP.to(low_MP.dtype), mask=mask_MP)
    tl.store(out_ptr_MP + HALF, turned_high_MP.to(low_MP.dtype), mask=mask_MP)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_kv_heads", "prefetch"])
def _fused_kernel(
    x_1: tl.tensor,
    x_2: tl.tensor,
    weights: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    write_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    num_weight_rows: tl.tensor,
    stride_hidden: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    prefetch: tl.tensor,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    REST_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: BLOCK_P pairs of one head, BLOCK_M + REST_M rows, the whole hidden size."""
    # Tiles of rows come first: programs that share weights run side by side and read them from memory once.
    row_tiles = tl.cdiv(num_rows, BLOCK_M + REST_M)
    part = tl.program_id(0) // row_tiles
    parts: tl.constexpr = (HALF + BLOCK_P - 1) // BLOCK_P
    head = part // parts
    row = tl.program_id(0) % row_tiles * (BLOCK_M + REST_M)
    pair = part % parts * BLOCK_P
    first = head * 2 * HALF + pair
    if PDL:
        before_the_wait(weight_ptr, first, 0, num_weight_rows, HALF, prefetch, D, BLOCK_P, 1, 2)
    sums = accumulate(
        x_1, x_2, weights, row, first, 0, D, num_rows, num_weight_rows, HALF, stride_hidden,
        D, BLOCK_M, REST_M, BLOCK_P, 1, 2, BLOCK_D, SWAP, TMA, EXACT,
    )  # fmt: skip
    for b in tl.static_range(2 if REST_M > 0 else 1):
        low_MP = sums[2 * b]
        high_MP = sums[2 * b + 1]
        if SWAP:
            low_MP = tl.trans(low_MP)
            high_MP = tl.trans(high_MP)
        _turn_and_store(
            low_MP, high_MP, row + b * BLOCK_M, head, pair, bias_ptr, cos_ptr, sin_ptr, write_ptr, q_ptr, k_ptr, v_ptr,
            num_rows, num_heads, num_kv_heads, stride_k, stride_v, HALF, BIAS, REST_M if b else BLOCK_M, BLOCK_P,
        )  # fmt: skip


@triton.jit
def _turn_and_store(
    low_MP: tl.tensor,
    high_MP: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    pair: tl.tensor,
    bias_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    write_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    HALF: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """The sums of one head's pairs, with their bias and turned, to where this kind of head belongs."""
    row_M = (row + tl.arange(0, ROWS)).to(tl.int64)
    pair_P = pair + tl.arange(0, BLOCK_P)
    row_mask_M = row_M < num_rows
    mask_MP = row_mask_M[:, None] & (pair_P < HALF)[None, :]
    if BIAS:
        bias_ptr_P = bias_ptr + head * 2 * HALF + pair_P
        low_MP += tl.load(bias_ptr_P, mask=pair_P < HALF, other=0.0).to(tl.float32)[None, :]
        high_MP += tl.load(bias_ptr_P + HALF, mask=pair_P < HALF, other=0.0).to(tl.float32)[None, :]
    if head >= num_heads + num_kv_heads:
        entry_M = tl.load(write_ptr + row_M, mask=row_mask_M, other=0)
        value_head = head - num_heads - num_kv_heads
        out_ptr_MP = v_ptr + entry_M[:, None] * stride_v + value_head * 2 * HALF + pair_P[None, :]
        tl.store(out_ptr_MP, low_MP, mask=mask_MP)
        tl.store(out_ptr_MP + HALF, high_MP, mask=mask_MP)
    else:
        cos_MP = tl.load(cos_ptr + row_M[:, None] * HALF + pair_P[None, :], mask=mask_MP, other=0.0)
        sin_MP = tl.load(sin_ptr + row_M[:, None] * HALF + pair_P[None, :], mask=mask_MP, other=0.0)
        turned_low_MP = low_MP * cos_MP - high_MP * sin_MP
        turned_high_MP = high_MP * cos_MP + low_MP * sin_MP
        if head < num_heads:
            out_ptr_MP = q_ptr + row_M[:, None] * (num_heads * 2 * HALF) + head * 2 * HALF + pair_P[None, :]
            tl.store(out_ptr_MP, turned_low_MP, mask=mask_MP)
            tl.store(out_ptr_MP + HALF, turned_high_MP, mask=mask_MP)
        else:
            entry_M = tl.load(write_ptr + row_M, mask=row_mask_M, other=0)
            out_ptr_MP = k_ptr + entry_M[:, None] * stride_k + (head - num_heads) * 2 * HALF + pair_P[None, :]
            tl.store(out_ptr_MP, turned_low_MP, mask=mask_MP)
            tl.store(out_ptr_MP + HALF, turned_high_MP, mask=mask_MP)
