"""Matrix products of few rows, where reading the weights is all the time that counts.

The library loses a fifth of the bandwidth to the launch, the first loads and the last programs of products that take
26 us each. Here a program keeps its loads deep, brings its first weights into the cache while the kernel before it
still runs (``pdl``), and may take a share of K only: whoever reads the product then adds the shares in a fixed order,
so no result depends on which program was first. Factors of 8 bits (e4m3) run through the same loop: their shares are
bare sums, and the two scales come once, where the shares are added.

M rows, N weight rows (output columns), K weight columns, Z shares of K
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from unmask.ops.reference.fp8 import Fp8Weight
from unmask.ops.triton import launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

MAX_ROWS = 192
"""More rows go through the weights again, 128 at a time."""


@dataclass(frozen=True)
class Tile:
    """How a product is cut into programs and its loop into stages."""

    width: int
    """Weight rows of a strip, one tensor-core operand."""
    depth: int
    """Columns of the weights that one stage takes."""
    strips: int = 1
    """Neighbouring strips of a program; a gated product has as many of ``up`` again. Three make widths like 192."""
    splits: int = 1
    """Shares of K."""
    num_warps: int = 4
    num_stages: int = 4
    swap: bool = True
    """Weight rows are the tensor cores' 64 rows, and rows of the pass their columns: 16 rows cost 16, not 64."""
    tma: bool = True
    """Tiles come by tensor descriptor, without address registers; else by pointers, which take any stride."""
    prefetch: int = 256
    """Columns of each weight row that go to the cache before the program waits for the kernel before it."""
    promote: int = 0
    """8-bit factors: columns, at most ``depth``, that the tensor cores add up before their sum joins one of full fp32;
    0 leaves all to them, which keep 14 bits of a sum."""


GATED_TILES: dict[tuple[int, int, int], Tile] = {
    (32, 24576, 4096): Tile(64, 64, 1, 1, 4, 3),
    (128, 24576, 4096): Tile(128, 64, 1, 1, 8, 4, swap=False),
}
"""(most rows, N, K) -> the tile that beats the library on an H200, launched plainly: LLaDA-8B's gate and up with the
activation take 52.0 us at 32 rows and 55.5 at 128, the library's product with a kernel behind it 53.6 and 59.8 (floor
48.2). Its other products gain nothing at 128 rows: qkv 30.5 for 28.8, down 33.7 for 33.6, out 14.7 for 13.9. Early
launch, which hides 1 to 3 us of a product alone, costs 27 us a layer in the chain at 32 rows: programs that wait hold
the shared memory that the ones in front still need (docs/kernels.md)."""

FP8_TILES: dict[tuple[int, int, int], Tile | None] = {
    (32, 4096, 12288): Tile(64, 256, 1, 1, 4, 8),
    (128, 4096, 12288): Tile(64, 128, 1, 2, 4, 8),
    (160, 4096, 12288): Tile(64, 128, 1, 2, 4, 8),
    (32, 24576, 4096): Tile(64, 256, 1, 1, 4, 3),
    (128, 24576, 4096): Tile(64, 128, 1, 1, 4, 3),
    (160, 24576, 4096): Tile(128, 128, 1, 1, 4, 3),
    (32, 4096, 4096): Tile(64, 256, 1, 1, 4, 8),
    (128, 4096, 4096): Tile(32, 128, 1, 1, 4, 8, swap=False),
    (160, 4096, 4096): Tile(64, 128, 1, 2, 4, 8),
    (32, 12288, 4096): Tile(64, 256, 1, 1, 4, 4),
    (128, 12288, 4096): None,
    (160, 12288, 4096): Tile(64, 128, 1, 1, 4, 4),
}
"""The same for products in 8 bits. Measured on an H200, us, the library's beside them: down 16.2 at 32 rows (32.2) and
20.8 at 128 (32.5), gate and up 26.8 (32.7) and 31.2 (33.3), out 8.0 (13.7) and 10.1 (13.9), qkv 15.6 (20.6) and 18.4
(17.8, which stays); the four in a chain 65 us a layer (97) and 79 (94). The floor is 52."""


def supported(x: Tensor, weight: Tensor) -> bool:
    """Whether these kernels take the call: no fp64, one type, weights in one piece."""
    return x.dtype in DTYPES and x.dtype == weight.dtype and weight.dim() == 2 and weight.is_contiguous()


def faster_gated(x: Tensor, weight: Tensor) -> Tile | None:
    """The tile with which `linear_swiglu` is known to beat the library; None where it is not, or cannot run.

    On Hopper alone, and in bf16: the tiles are cut for its tensor cores.
    """
    if x.dtype != torch.bfloat16 or x.dim() != 2 or not is_hopper(x.device) or not supported(x, weight):
        return None
    return _tile_of(GATED_TILES, len(x), weight.shape)


def faster_fp8(num_rows: int, weight: Fp8Weight) -> Tile | None:
    """As `faster_gated`, for `linear_fp8`."""
    value_ND = weight.value_ND
    if value_ND.dtype != torch.float8_e4m3fn or not value_ND.is_contiguous() or not is_hopper(value_ND.device):
        return None
    return _tile_of(FP8_TILES, num_rows, value_ND.shape)


def _tile_of(tiles: Mapping[tuple[int, int, int], Tile | None], num_rows: int, shape: torch.Size) -> Tile | None:
    found = [(most, tile) for (most, n, k), tile in tiles.items() if (n, k) == shape and num_rows <= most]
    return min(found, key=lambda each: each[0])[1] if found else None


@lru_cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def linear(
    x_MD: Tensor, weight_ND: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None, pdl: bool = False
) -> Tensor:
    """`F.linear`; bias is added to the sums in fp32.

    ``pdl`` (sm_90 and later): be launched while the kernel before still runs, and bring the first weights into the
    cache meanwhile. Nothing is read before that kernel has ended, not even weights that it writes.
    """
    tile = tile or tile_for(len(x_MD), len(weight_ND))
    if tile.splits > 1:
        return _sum(linear_parts(x_MD, weight_ND, tile=tile, pdl=pdl), bias, x_MD.dtype, pdl)
    out_MN = x_MD.new_empty(len(x_MD), len(weight_ND))
    _launch(x_MD, weight_ND, bias, out_MN, tile, pdl, gated=False)
    return out_MN


def linear_fp8(
    value_MD: Tensor,
    scale_M: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    tile: Tile | None = None,
    dtype: torch.dtype = torch.bfloat16,
    early_sum: bool = False,
) -> Tensor:
    """Rows of 8 bits times such a weight: the fp32 sum, then ``scale_M``, the weight's scales and the bias in fp32, and
    one rounding to ``dtype``.

    ``early_sum``: the kernel that adds shares is launched while they are made. It holds no shared memory.
    """
    tile = tile or tile_for(len(value_MD), len(weight))
    scales = scale_M.contiguous(), weight.scale_N.contiguous()
    if tile.splits > 1:
        return _sum(linear_parts(value_MD, weight.value_ND, tile=tile), bias, dtype, early_sum, scales)
    out_MN = value_MD.new_empty(len(value_MD), len(weight), dtype=dtype)
    _launch(value_MD, weight.value_ND, bias, out_MN, tile, False, gated=False, scales=scales)
    return out_MN


def linear_swiglu(x_MD: Tensor, weight_ND: Tensor, *, tile: Tile | None = None, pdl: bool = False) -> Tensor:
    """silu(gate) * up of the product's halves, in fp32; rounded once, where the reference rounds three times."""
    size = len(weight_ND) // 2
    out_MF = x_MD.new_empty(len(x_MD), size)
    tile = tile or tile_for(len(x_MD), len(weight_ND), gated=True)
    _launch(x_MD, weight_ND, None, out_MF, replace(tile, splits=1), pdl, gated=True)
    return out_MF


def linear_parts(x_MD: Tensor, weight_ND: Tensor, *, tile: Tile | None = None, pdl: bool = False) -> Tensor:
    """The product in shares of K: fp32 [Z, M, N], to be added from the first to the last."""
    tile = tile or tile_for(len(x_MD), len(weight_ND), parts=True)
    out_ZMN = x_MD.new_empty(tile.splits, len(x_MD), len(weight_ND), dtype=torch.float32)
    _launch(x_MD, weight_ND, None, out_ZMN, tile, pdl, gated=False)
    return out_ZMN


def tile_for(
    num_rows: int, num_columns: int, *, gated: bool = False, parts: bool = False, processors: int = 132
) -> Tile:
    """From shapes alone: a captured step may not look at values.

    To be measured; prediction: with the weights' tile wider than the rows, and 96 to 200 programs that are all resident
    at once, memory is the bound and not the balance; beyond 64 rows each reads the rows again, hence 128 and more.
    """
    few = num_rows <= 64
    halves = 2 if gated else 1
    tile = Tile(64, 128 if few else 64, 1 if few else 2, 1, 4 if few else 8, 5)
    if gated:
        tile = replace(tile, num_warps=8)
    programs = triton.cdiv(num_columns, tile.width * tile.strips * halves)
    if programs < processors // 2 and tile.strips > 1:
        tile, programs = replace(tile, strips=1), programs * tile.strips
    if parts:
        while programs * tile.splits * 2 <= 2 * processors and tile.splits < 8:
            tile = replace(tile, splits=tile.splits * 2)
    return tile


def blocks_of(num_rows: int) -> tuple[int, int]:
    """The rows of a program as one or two powers of 2: 160 = 128 + 32 costs 160, 256 would cost 256."""
    if num_rows <= 128 or num_rows > MAX_ROWS:
        return min(128, max(16, triton.next_power_of_2(num_rows))), 0
    return 128, max(16, triton.next_power_of_2(num_rows - 128))


def fits_descriptor(*tensors: Tensor) -> bool:
    """Tensor descriptors want 16 bytes of alignment for the start and for every row."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in tensors)


@lru_cache
def shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 * 1024
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024))


def fit(tile: Tile, rows: int, strips: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """As many stages as shared memory holds; in fp32, which no matrix unit takes exactly, a small loop."""
    if dtype == torch.float32:
        tile = replace(tile, depth=max(16, tile.depth // 4), num_stages=min(2, tile.num_stages))
    stage = (rows + strips * tile.width) * tile.depth * dtype.itemsize
    return replace(tile, num_stages=max(1, min(tile.num_stages, (shared_bytes(device) - 4096) // stage)))


def sources(
    x_MD: Tensor, weight_ND: Tensor, tile: Tile, blocks: tuple[int, int]
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor | None, Tensor | TensorDescriptor]:
    """What the loop loads from: rows in one or two blocks, and weights."""
    if not tile.tma:
        return x_MD, x_MD if blocks[1] else None, weight_ND
    of = TensorDescriptor.from_tensor
    x_2 = of(x_MD, [blocks[1], tile.depth]) if blocks[1] else None
    return of(x_MD, [blocks[0], tile.depth]), x_2, of(weight_ND, [tile.width, tile.depth])


def _launch(
    x_MD: Tensor,
    weight_ND: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    pdl: bool,
    *,
    gated: bool,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    num_rows, depth = x_MD.shape
    if num_rows == 0:
        return
    if x_MD.stride(1) != 1:
        x_MD = x_MD.contiguous()
    tile = replace(tile, tma=tile.tma and fits_descriptor(x_MD, weight_ND))
    blocks, strips = blocks_of(num_rows), tile.strips * (2 if gated else 1)
    tile = fit(tile, sum(blocks), strips, x_MD.dtype, x_MD.device)
    columns = len(weight_ND) // 2 if gated else len(weight_ND)
    grid = triton.cdiv(columns, tile.width * tile.strips) * tile.splits * triton.cdiv(num_rows, sum(blocks))
    x_1, x_2, weights = sources(x_MD, weight_ND, tile, blocks)
    _linear_kernel[(grid,)](
        x_1,
        x_2,
        weights,
        weight_ND,
        bias,
        *(scales or (None, None)),
        out,
        num_rows,
        columns,
        x_MD.stride(0),
        prefetched(tile, weight_ND),
        K=depth,
        GATED=gated,
        BIAS=bias is not None,
        SCALED=scales is not None,
        EXACT=x_MD.dtype == torch.float32,
        BLOCK_M=blocks[0],
        REST_M=blocks[1],
        BLOCK_N=tile.width,
        STRIPS=tile.strips,
        BLOCK_K=tile.depth,
        SPLITS=tile.splits,
        SWAP=tile.swap,
        TMA=tile.tma,
        PDL=pdl,
        PROMOTE=tile.promote,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch.options(pdl),
    )


def prefetched(tile: Tile, weight_ND: Tensor) -> int:
    """Bytes of a weight row; whole 16s of an aligned row, or none."""
    if not fits_descriptor(weight_ND):
        return 0
    depth: int = triton.cdiv(triton.cdiv(weight_ND.shape[1], tile.depth), tile.splits) * tile.depth
    return min(tile.prefetch, depth, weight_ND.shape[1]) * weight_ND.element_size() // 16 * 16


def _sum(
    part_ZMN: Tensor, bias: Tensor | None, dtype: torch.dtype, pdl: bool, scales: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    num_parts, num_rows, size = part_ZMN.shape
    out_MN = torch.empty(num_rows, size, dtype=dtype, device=part_ZMN.device)
    if num_rows:
        _sum_kernel[(num_rows * triton.cdiv(size, 1024),)](
            part_ZMN,
            bias,
            *(scales or (None, None)),
            out_MN,
            num_rows,
            size,
            PARTS=num_parts,
            BIAS=bias is not None,
            SCALED=scales is not None,
            BLOCK_N=1024,
            PDL=pdl,
            num_warps=4,
            **launch.options(pdl),
        )
    return out_MN


@triton.jit
def load_tile(
    source: tl.tensor,
    row: tl.tensor,
    k: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
) -> tl.tensor:
    """ROWS x BLOCK_K. Rows beyond the last are zeros or the last again: they are not stored. Columns are zeros."""
    if TMA:
        tile_RK = source.load([row, k])
    else:
        row_R = tl.minimum(row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
        k_K = k + tl.arange(0, BLOCK_K)
        ptr_RK = source + row_R[:, None] * stride + k_K[None, :]
        if K % BLOCK_K == 0:
            tile_RK = tl.load(ptr_RK)
        else:
            tile_RK = tl.load(ptr_RK, mask=(k_K < K)[None, :], other=0.0)
    return tile_RK


@triton.jit
def _dot(
    x_MK: tl.tensor,
    w_NK: tl.tensor,
    acc: tl.tensor,
    SWAP: tl.constexpr,
    EXACT: tl.constexpr,
    PROMOTE: tl.constexpr,
) -> tl.tensor:
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    imprecise: tl.constexpr = PROMOTE if PROMOTE > 0 else None
    if SWAP:
        acc = tl.dot(w_NK, tl.trans(x_MK), acc, input_precision=precision, max_num_imprecise_acc=imprecise)
    else:
        acc = tl.dot(x_MK, tl.trans(w_NK), acc, input_precision=precision, max_num_imprecise_acc=imprecise)
    return acc


@triton.jit
def before_the_wait(
    weight_ptr: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    num_weight_rows: tl.tensor,
    jump: tl.tensor,
    prefetch: tl.tensor,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIPS: tl.constexpr,
    JUMPS: tl.constexpr,
) -> None:
    """Let the next kernel start, bring ``prefetch`` bytes of each of this program's weight rows into the cache, and
    wait for the kernel before. The next one waits for this one's end, so nobody reads what is not written."""
    tl.extra.cuda.gdc_launch_dependents()
    if prefetch > 0:
        size = prefetch // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        for s in tl.static_range(STRIPS * JUMPS):
            row = first + (s % STRIPS) * BLOCK_N + (s // STRIPS) * jump
            row_N = tl.minimum(row + tl.arange(0, BLOCK_N), num_weight_rows - 1).to(tl.int64)
            # The share of the last columns may be shorter than what is asked for: back from the row's end then.
            address_N = (weight_ptr + row_N * K + tl.minimum(k, K - size)).to(tl.int64)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [address_N, tl.zeros((BLOCK_N,), tl.int32) + prefetch],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    tl.extra.cuda.gdc_wait()


@triton.jit
def accumulate(
    x_1: tl.tensor,
    x_2: tl.tensor,
    weights: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    num_rows: tl.tensor,
    num_weight_rows: tl.tensor,
    jump: tl.tensor,
    stride_x: tl.tensor,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    REST_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIPS: tl.constexpr,
    JUMPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EXACT: tl.constexpr,
    PROMOTE: tl.constexpr = 0,
) -> tl.tuple:
    """fp32 sums of rows from ``row`` with STRIPS strips of weight rows from ``first``, and with as many again ``jump``
    further on for each of JUMPS: first all strips of BLOCK_M rows, then all of REST_M."""
    sums: tl.tuple = ()
    for _ in tl.static_range(STRIPS * JUMPS):
        if SWAP:
            sums = sums + (tl.zeros((BLOCK_N, BLOCK_M), tl.float32),)  # noqa: RUF005
        else:
            sums = sums + (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)  # noqa: RUF005
    if REST_M > 0:
        for _ in tl.static_range(STRIPS * JUMPS):
            if SWAP:
                sums = sums + (tl.zeros((BLOCK_N, REST_M), tl.float32),)  # noqa: RUF005
            else:
                sums = sums + (tl.zeros((REST_M, BLOCK_N), tl.float32),)  # noqa: RUF005
    for k in range(begin, end, BLOCK_K):
        x_MK = load_tile(x_1, row, k, num_rows, stride_x, K, BLOCK_M, BLOCK_K, TMA)
        if REST_M > 0:
            rest_MK = load_tile(x_2, row + BLOCK_M, k, num_rows, stride_x, K, REST_M, BLOCK_K, TMA)
        new: tl.tuple = ()
        rest: tl.tuple = ()
        for s in tl.static_range(STRIPS * JUMPS):
            n = first + (s % STRIPS) * BLOCK_N + (s // STRIPS) * jump
            w_NK = load_tile(weights, n, k, num_weight_rows, K, K, BLOCK_N, BLOCK_K, TMA)
            new = new + (_dot(x_MK, w_NK, sums[s], SWAP, EXACT, PROMOTE),)  # noqa: RUF005
            if REST_M > 0:
                sum_rest = _dot(rest_MK, w_NK, sums[STRIPS * JUMPS + s], SWAP, EXACT, PROMOTE)
                rest = rest + (sum_rest,)  # noqa: RUF005
        sums = new + rest
    return sums


@triton.jit
def _scaled(
    sum_MN: tl.tensor,
    scale_m_ptr: tl.tensor,
    scale_n_ptr: tl.tensor,
    row: tl.tensor,
    n: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """In the reference's order: the row's scale first."""
    row_M = row + tl.arange(0, ROWS)
    n_N = n + tl.arange(0, BLOCK_N)
    scale_M = tl.load(scale_m_ptr + row_M, mask=row_M < num_rows, other=0.0)
    scale_N = tl.load(scale_n_ptr + n_N, mask=n_N < columns, other=0.0)
    return sum_MN * scale_M[:, None] * scale_N[None, :]


@triton.jit
def _store(
    out_ptr: tl.tensor,
    sum_MN: tl.tensor,
    row: tl.tensor,
    n: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row_M = row + tl.arange(0, ROWS)
    n_N = n + tl.arange(0, BLOCK_N)
    mask_MN = (row_M < num_rows)[:, None] & (n_N < columns)[None, :]
    at_MN = row_M.to(tl.int64)[:, None] * columns + n_N[None, :]
    tl.store(out_ptr + at_MN, sum_MN.to(out_ptr.dtype.element_ty), mask=mask_MN)


@triton.jit(do_not_specialize=["num_rows", "prefetch"])
def _linear_kernel(
    x_1: tl.tensor,
    x_2: tl.tensor,
    weights: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_m_ptr: tl.tensor,
    scale_n_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    stride_x: tl.tensor,
    prefetch: tl.tensor,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    REST_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    PROMOTE: tl.constexpr,
) -> None:
    """One program: STRIPS strips of output columns, BLOCK_M + REST_M rows, one share of K."""
    # Tiles of rows come first, then shares: programs that share weights, or lie in one row of them, run side by side.
    row_tiles = tl.cdiv(num_rows, BLOCK_M + REST_M)
    row = tl.program_id(0) % row_tiles * (BLOCK_M + REST_M)
    part = tl.program_id(0) // row_tiles % SPLITS
    first = tl.program_id(0) // row_tiles // SPLITS * (BLOCK_N * STRIPS)
    share: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    begin = part * share
    end = begin + share if share * SPLITS == K else tl.minimum(begin + share, K)
    JUMPS: tl.constexpr = 2 if GATED else 1
    num_weight_rows = columns * JUMPS
    if PDL:
        before_the_wait(weight_ptr, first, begin, num_weight_rows, columns, prefetch, K, BLOCK_N, STRIPS, JUMPS)
    sums = accumulate(
        x_1, x_2, weights, row, first, begin, end, num_rows, num_weight_rows, columns, stride_x,
        K, BLOCK_M, REST_M, BLOCK_N, STRIPS, JUMPS, BLOCK_K, SWAP, TMA, EXACT, PROMOTE,
    )  # fmt: skip
    out_ptr += part.to(tl.int64) * num_rows * columns
    for b in tl.static_range(2 if REST_M > 0 else 1):
        for s in tl.static_range(STRIPS):
            n = first + s * BLOCK_N
            sum_MN = sums[b * STRIPS * JUMPS + s]
            if GATED:
                sum_MN = sum_MN / (1 + tl.exp(-sum_MN)) * sums[b * STRIPS * JUMPS + STRIPS + s]
            if SWAP:
                sum_MN = tl.trans(sum_MN)
            if SCALED:
                sum_MN = _scaled(
                    sum_MN, scale_m_ptr, scale_n_ptr, row + b * BLOCK_M, n, num_rows, columns,
                    REST_M if b else BLOCK_M, BLOCK_N,
                )  # fmt: skip
            if BIAS:
                n_N = n + tl.arange(0, BLOCK_N)
                sum_MN += tl.load(bias_ptr + n_N, mask=n_N < columns, other=0.0).to(tl.float32)[None, :]
            if b == 0:
                _store(out_ptr, sum_MN, row, n, num_rows, columns, BLOCK_M, BLOCK_N)
            else:
                _store(out_ptr, sum_MN, row + BLOCK_M, n, num_rows, columns, REST_M, BLOCK_N)


@triton.jit
def _sum_parts(
    part_ptr_N: tl.tensor, step: tl.tensor, mask_N: tl.tensor, PARTS: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """From the first to the last, so the same on every run."""
    sum_N = tl.zeros((BLOCK_N,), tl.float32)
    for _ in tl.static_range(PARTS):
        sum_N += tl.load(part_ptr_N, mask=mask_N, other=0.0)
        part_ptr_N += step
    return sum_N


@triton.jit
def _sum_kernel(
    part_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_m_ptr: tl.tensor,
    scale_n_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(size, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    n_N = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_N = _sum_parts(part_ptr + row * size + n_N, row * 0 + num_rows * size, n_N < size, PARTS, BLOCK_N)
    if SCALED:
        sum_N = sum_N * tl.load(scale_m_ptr + row) * tl.load(scale_n_ptr + n_N, mask=n_N < size, other=0.0)
    if BIAS:
        sum_N += tl.load(bias_ptr + n_N, mask=n_N < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + n_N, sum_N, mask=n_N < size)
