"""`attend` and `tracking_mass` of `ops.reference.attend` as Triton kernels: paged, GQA, split over keys for few rows.

One program has a block of a seat's rows, one key head and a share of the keys. The query heads that share a key head
are more rows of its tile: row r under head g of the group is packed row r * G + g. K and V are gathered entry by entry
through a table that is made once a pass; a shadowed position has no entry in it, so there is no second mask to read.

M rows, S seats, P pages of a seat, N positions, E entries of the pool, J live entries, H query heads, Hkv key heads,
G = H/Hkv, hd head size, B blocks of rows, Z splits; inside the kernels M packed rows and N keys of a tile, D = hd,
C columns of all key heads together
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels: triton has no stubs, so their types would all be Any)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unmask.ops.reference.attend import MassSum, Sight
from unmask.ops.triton import launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 128)
LIVE_STEP = 64
"""Live entries that are read at a time, at most."""
LOG2_E = 1.4426950408889634
MIN_DOT = 16
"""Smallest side of a matrix product."""


@dataclass(frozen=True)
class Tile:
    """How a pass is cut into programs."""

    block_m: int
    """Packed rows of a program."""
    block_n: int
    """Keys of a step."""
    num_splits: int
    """Programs that share the keys of a block of rows."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread: 128 lets two programs of 8 warps share a processor."""


def supported(q_M: Tensor, k_E: Tensor, v_E: Tensor) -> bool:
    """Whether these kernels take the call, from shapes and types alone. The reference takes every call."""
    wants_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (q_M, k_E, v_E))
    return (
        q_M.dtype == k_E.dtype == v_E.dtype
        and q_M.dtype in DTYPES
        and q_M.shape[2] in HEAD_DIMS
        and q_M.stride(2) == k_E.stride(2) == v_E.stride(2) == 1
        and not wants_grad
    )


def attend(
    q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Sight, mass: MassSum | None = None, tile: Tile | None = None
) -> Tensor:
    """Rows ``q`` [M, H, hd] over the entries ``k``, ``v`` [E, Hkv, hd] of one layer; returns [M, H, hd].

    Rows that see nothing get zeros. Raw ``mass`` comes from the same sweep, so that K is read once: the counted rows'
    queries, summed, are one more row of each seat's first block. Each of its sums is one program's alone, so the mass
    is the same from run to run.
    """
    out_M = torch.empty(q_M.shape, dtype=q_M.dtype, device=q_M.device)
    tile = tile or choose_tile(q_M, k_E, sight)
    if mass is not None and mass.softmax:
        mass.add(tracking_mass(q_M, k_E, sight, mass.counts_M, softmax=True))
        mass = None
    _sweep(q_M, k_E, v_E, sight, tile, out_M, mass=mass)
    return out_M


def attend_in_tiles(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Sight, tile: Tile) -> Tensor:
    """`attend`, cut as told."""
    return attend(q_M, k_E, v_E, sight, tile=tile)


def attend_and_mass(
    q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Sight, counts_M: Tensor, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """`attend` and the raw `tracking_mass` of one layer, from one sweep."""
    mass = MassSum(counts_M)
    out_M = attend(q_M, k_E, v_E, sight, mass, tile)
    total_SN = mass.total_SN()
    if total_SN is None:  # there are no rows
        total_SN = out_M.new_zeros(len(sight.page_table_SP), _num_positions(sight), dtype=torch.float32)
    return out_M, total_SN


def tracking_mass(q_M: Tensor, k_E: Tensor, sight: Sight, counts_M: Tensor, *, softmax: bool = False) -> Tensor:
    """How much the rows ``counts`` bool [M] look at each canvas position: fp32 [S, N]; see the reference.

    It reads the keys of the seats in which a row counts once more than `attend`, with ``softmax`` twice more.
    """
    if softmax:
        return _softmax_mass(q_M, k_E, sight, counts_M, choose_tile(q_M, k_E, sight))
    return _raw_mass(q_M, k_E, sight, counts_M)


# Cutting a pass into programs


def choose_tile(q_M: Tensor, k_E: Tensor, sight: Sight) -> Tile:
    """From static shapes alone: a captured pass must not look at values."""
    num_seats, group = len(sight.page_table_SP), q_M.shape[1] // k_E.shape[1]
    rows_a_seat = sight.per_seat if sight.per_seat is not None else triton.cdiv(len(q_M), num_seats)
    return _tile_for(
        rows_a_seat * group,
        num_seats * k_E.shape[1],
        sight.num_keys,
        q_M.dtype == torch.float32,
        _num_processors(q_M.device),
    )


def _tile_for(packed: int, num_sweeps: int, num_keys: int, is_fp32: bool, num_processors: int) -> Tile:
    """For ``packed`` rows of a seat under one key head, and ``num_sweeps`` pairs of a seat and a key head.

    Measured on one H200, head size 128, us a layer (docs/kernels.md): 32 seats x 128 rows x 1,536 keys take 282 in
    128 x 128, with mass 310 where narrower steps take 338 and more; 1 seat takes 18.5 in 4 shares of 128 x 64, 22.6 and
    more in others; 160 rows x 32 seats 424 in 64 x 64 and 527 in 128 x 64; 16 rows x 1 seat 12.1 in 4 shares of
    16 x 128 and 14.1 in 8 of 64 x 64.
    """
    if is_fp32:  # exact products run on no matrix unit: small tiles, or everything spills
        tile = Tile(16, 32, 1, num_warps=8, num_stages=1)
    elif packed <= 16:
        tile = Tile(16, 128, 1, num_warps=4, num_stages=3)
    elif 0 < packed % 128 <= 64:  # half of the last block of 128 would be empty
        tile = Tile(64, 64, 1, num_warps=4, num_stages=3)
    else:
        tile = Tile(128, 128, 1, num_warps=8, num_stages=3)
    num_programs = triton.cdiv(packed, tile.block_m) * num_sweeps
    # Every processor has what fits it: two small programs or a large one. Each has at least 128 keys: a share costs
    # 64 KB of traffic of its own.
    num_places = num_processors * (2 if tile.block_m == 64 else 1)
    num_splits = max(1, min(num_places // max(1, num_programs), num_keys // 128, 16))
    if tile.block_m == 128 and num_splits > 1:
        tile = replace(tile, block_n=64)
    return replace(tile, num_splits=num_splits)


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _num_positions(sight: Sight) -> int:
    return sight.page_table_SP.shape[1] * sight.page_size


# Tables of a pass, which all layers share


def _tables(sight: Sight) -> dict[Any, tuple[Tensor | None, Tensor]]:
    tables: dict[Any, tuple[Tensor | None, Tensor]] = vars(sight).setdefault("_triton_tables", {})
    return tables


def _once(sight: Sight, key: Any, make: Callable[[], Tensor], source: Tensor | None = None) -> Tensor:
    """A table of this sight, made on its first use, and again when it comes of another ``source``. It lives and dies
    with the pass."""
    tables = _tables(sight)
    if key not in tables or tables[key][0] is not source:
        tables[key] = (source, make())
    return tables[key][1]


def _whole(sight: Sight) -> Sight:
    return sight if sight.whole is None else sight.whole


def _entries(sight: Sight) -> Tensor:
    """int32 [S, N]: the pool's entry of every position, -1 where it is shadowed; the same for all parts of a pass."""
    return _once(_whole(sight), "entries", lambda: _make_entries(sight))


def _make_entries(sight: Sight) -> Tensor:
    pages_SP, shadow_SN = sight.page_table_SP, sight.shadow_SN
    num_seats, num_positions = len(pages_SP), _num_positions(sight)
    out_SN = torch.empty(num_seats, num_positions, dtype=torch.int32, device=pages_SP.device)
    block = 1024
    _entries_kernel[(triton.cdiv(num_positions, block), num_seats)](
        out_SN,
        pages_SP,
        _as_bytes(shadow_SN),
        pages_SP.stride(0),
        0 if shadow_SN is None else shadow_SN.stride(0),
        num_positions,
        PAGE_SIZE=sight.page_size,
        SHADOWED=shadow_SN is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out_SN


def _blocks(sight: Sight, group: int, block_m: int) -> Tensor:
    """int32 [B, 6] for each block of rows: seat, its first row, the row after its last, the block's first packed row,
    how far the furthest of its rows sees, and how far all of them do.

    The B of ragged rows is a bound that needs no look at their counts; the blocks too many have no rows.
    """
    return _once(sight, ("blocks", group, block_m), lambda: _make_blocks(sight, group, block_m))


def _make_blocks(sight: Sight, group: int, block_m: int) -> Tensor:
    num_rows_S, per_seat = sight.num_rows_S, sight.per_seat
    num_seats, num_blocks = len(num_rows_S), _num_blocks(sight, group, block_m)
    out_B6 = torch.empty(num_blocks, 6, dtype=torch.int32, device=num_rows_S.device)
    _blocks_kernel[(num_blocks,)](
        out_B6,
        num_rows_S,
        sight.see_M,
        num_seats,
        sight.num_keys,
        per_seat or 0,
        num_blocks // num_seats,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_S=triton.next_power_of_2(num_seats),
        RAGGED=per_seat is None,
        num_warps=1,
    )
    return out_B6


def _num_blocks(sight: Sight, group: int, block_m: int) -> int:
    num_seats = len(sight.num_rows_S)
    if sight.per_seat is None:
        return len(sight.see_M) * group // block_m + num_seats
    num_blocks: int = num_seats * triton.cdiv(sight.per_seat * group, block_m)
    return num_blocks


def _told_by(sight: Sight, group: int, block_m: int) -> tuple[Sight, int, int]:
    """Whose blocks say how far rows see, and their size. For a part of fixed shape a seat of the whole is one: all its
    rows, picked or not, see no less, and one table serves every layer of the pass."""
    whole = sight.whole
    if whole is None or whole.per_seat is None or sight.per_seat is None:
        return sight, group, block_m
    return whole, 1, triton.next_power_of_2(whole.per_seat)


def _seat_rows(sight: Sight) -> Tensor:
    """int32 [S, 2] of ragged rows: each seat's first row and the row after its last."""
    return _once(sight, "rows", lambda: _make_seat_rows(sight))


def _make_seat_rows(sight: Sight) -> Tensor:
    end_S = sight.num_rows_S.cumsum(0)
    return torch.stack((end_S - sight.num_rows_S, end_S), 1).int()


def _as_bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.view(torch.uint8)


# Launches


def _sweep(
    q_M: Tensor,
    k_E: Tensor,
    v_E: Tensor,
    sight: Sight,
    tile: Tile,
    out_M: Tensor | None,
    *,
    mass: MassSum | None = None,
    counts_M: Tensor | None = None,
    log_sum_MH: Tensor | None = None,
) -> None:
    """Attention to ``out``, or without it the log-sum-exp (base 2) of the blocks in which a row counts. With ``mass``
    also the raw mass, as far as the counted rows see."""
    (num_rows, num_heads, head_dim), num_kv_heads = q_M.shape, k_E.shape[1]
    group, live_SJ, bits_MJ, num_splits = num_heads // num_kv_heads, sight.live_SJ, sight.live_bits_MJ, tile.num_splits
    if num_rows == 0:
        return
    pdl = launch.early(q_M.device)
    of, *size = _told_by(sight, group, tile.block_m)
    # Tables that an earlier layer made can be read before the kernel in front has ended.
    has_tables = "entries" in _tables(_whole(sight)) and ("blocks", *size) in _tables(of)
    blocks_B6 = _blocks(of, *size)
    num_blocks = len(blocks_B6) if of is sight else _num_blocks(sight, group, tile.block_m)
    num_live = 0 if live_SJ is None or bits_MJ is None else live_SJ.shape[1]
    if live_SJ is not None and bits_MJ is not None:
        live_SJ, bits_MJ = live_SJ.contiguous(), bits_MJ.contiguous()
    part_ZM, log_sum_ZM = out_M, log_sum_MH
    if num_splits > 1 and out_M is not None:
        part_ZM = torch.empty(num_splits, *q_M.shape, dtype=torch.float32, device=q_M.device)
        log_sum_ZM = torch.empty(num_splits, num_rows, num_heads, dtype=torch.float32, device=q_M.device)
    # A seat in one block sums its queries in the sweep itself; else they are summed before it.
    one_block = sight.per_seat is not None and sight.per_seat * group <= tile.block_m
    query_SHD = reach_S = None
    if mass is not None:
        counts_M = mass.counts_M
        if mass.part_SHN is None:
            shape = (len(sight.page_table_SP), num_kv_heads, _num_positions(sight))
            mass.part_SHN = torch.zeros(shape, dtype=torch.float32, device=q_M.device)
            mass.num_heads = num_heads
        if not one_block:
            query_SHD, reach_S = _query_sums(q_M, k_E, sight, counts_M)
    _sweep_kernel[(num_kv_heads, num_splits, num_blocks)](
        q_M,
        k_E,
        v_E,
        part_ZM,
        log_sum_ZM,
        None if mass is None else mass.part_SHN,
        _entries(sight),
        sight.see_M,
        blocks_B6,
        live_SJ,
        _as_bytes(bits_MJ),
        _as_bytes(counts_M),
        query_SHD,
        reach_S,
        q_M.stride(0),
        q_M.stride(1),
        k_E.stride(0),
        k_E.stride(1),
        v_E.stride(0),
        v_E.stride(1),
        0 if bits_MJ is None else bits_MJ.stride(0),
        num_rows,
        num_heads,
        _num_positions(sight),
        sight.num_keys,
        sight.per_seat or 0,
        num_blocks // len(sight.page_table_SP),
        num_live,
        LOG2_E / head_dim**0.5,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_J=max(MIN_DOT, min(LIVE_STEP, triton.next_power_of_2(num_live))),
        NUM_SPLITS=num_splits,
        RAGGED=sight.per_seat is None,
        SHADOWED=sight.shadow_SN is not None,
        LIVE=num_live > 0,
        VALUES=out_M is not None,
        MASS=mass is not None,
        ONE_BLOCK=one_block,
        PRECISION="ieee" if q_M.dtype == torch.float32 else "tf32",
        WIDE=max(k_E.shape[0] * k_E.stride(0), v_E.shape[0] * v_E.stride(0)) >= 2**31,
        PDL=pdl,
        HAS_TABLES=has_tables,
        BY_SEAT=of is not sight,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch.options(pdl),
        **({} if tile.max_registers is None else {"maxnreg": tile.max_registers}),
    )
    if part_ZM is not None and log_sum_ZM is not None:
        _combine(part_ZM, log_sum_ZM, out_M)


def _combine(part_ZM: Tensor, log_sum_ZM: Tensor, out_M: Tensor | None) -> None:
    num_splits, num_rows, num_heads, head_dim = part_ZM.shape
    pdl = launch.early(part_ZM.device)
    block_h = min(triton.next_power_of_2(num_heads), max(1, 1024 // head_dim))
    _combine_kernel[(num_rows, triton.cdiv(num_heads, block_h))](
        part_ZM,
        log_sum_ZM,
        out_M,
        num_rows,
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        NUM_SPLITS=num_splits,
        PDL=pdl,
        num_warps=4,
        **launch.options(pdl),
    )


def _new_mass(k_E: Tensor, sight: Sight) -> Tensor:
    """fp32 [S, Hkv, N], of the heads under each key head."""
    shape = (len(sight.page_table_SP), k_E.shape[1], _num_positions(sight))
    return torch.empty(shape, dtype=torch.float32, device=k_E.device)


def _query_sums(q_M: Tensor, k_E: Tensor, sight: Sight, counts_M: Tensor) -> tuple[Tensor, Tensor]:
    """The counted rows' queries under each key head, summed, fp32 [S, Hkv, hd]; how far those rows see, int32 [S]."""
    (_, num_heads, head_dim), num_kv_heads, num_seats = q_M.shape, k_E.shape[1], len(sight.page_table_SP)
    query_SHD = torch.empty(num_seats, num_kv_heads, head_dim, dtype=torch.float32, device=q_M.device)
    reach_S = torch.empty(num_seats, dtype=torch.int32, device=q_M.device)
    ragged = sight.per_seat is None
    _query_sum_kernel[(num_kv_heads, num_seats)](
        query_SHD,
        reach_S,
        q_M,
        sight.see_M,
        _as_bytes(counts_M),
        _seat_rows(sight) if ragged else None,
        q_M.stride(0),
        q_M.stride(1),
        sight.per_seat or 0,
        sight.num_keys,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=64,
        RAGGED=ragged,
        num_warps=4,
    )
    return query_SHD, reach_S


def _over_heads(mass_SHN: Tensor, num_heads: int) -> Tensor:
    """fp32 [S, N]: the mean over heads."""
    num_seats, num_kv_heads, num_positions = mass_SHN.shape
    out_SN = torch.empty(num_seats, num_positions, dtype=torch.float32, device=mass_SHN.device)
    block_n = 64
    _over_heads_kernel[(triton.cdiv(num_positions, block_n), num_seats)](
        out_SN,
        mass_SHN,
        num_positions,
        num_kv_heads,
        1 / num_heads,
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_N=block_n,
        num_warps=4,
    )
    return out_SN


def _raw_mass(q_M: Tensor, k_E: Tensor, sight: Sight, counts_M: Tensor) -> Tensor:
    num_columns, head_dim, num_positions = k_E.shape[1] * k_E.shape[2], k_E.shape[2], _num_positions(sight)
    query_SHD, reach_S = _query_sums(q_M, k_E, sight, counts_M)
    mass_SN = torch.empty(len(reach_S), num_positions, dtype=torch.float32, device=q_M.device)
    # 8 keys by 1,024 columns: 8 loads of 16 bytes in flight a thread. A prediction that waits for a measurement.
    block_n, block_c = 8, min(1024, triton.next_power_of_2(num_columns))
    _raw_mass_kernel[(triton.cdiv(num_positions, block_n), len(reach_S))](
        mass_SN,
        k_E,
        query_SHD,
        reach_S,
        _entries(sight),
        k_E.stride(0),
        k_E.stride(1),
        num_positions,
        1 / q_M.shape[1],
        HEAD_DIM=head_dim,
        NUM_COLUMNS=num_columns,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return mass_SN


def _softmax_mass(q_M: Tensor, k_E: Tensor, sight: Sight, counts_M: Tensor, tile: Tile) -> Tensor:
    """A sweep for the log-sum-exp of the counted rows, then one for their weights; K is read in both."""
    (num_rows, num_heads, head_dim), num_kv_heads, ragged = q_M.shape, k_E.shape[1], sight.per_seat is None
    log_sum_MH = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q_M.device)
    _sweep(q_M, k_E, k_E, sight, replace(tile, num_splits=1), None, counts_M=counts_M, log_sum_MH=log_sum_MH)
    mass_SHN, num_positions = _new_mass(k_E, sight), _num_positions(sight)
    _softmax_mass_kernel[(num_kv_heads, triton.cdiv(num_positions, tile.block_n), len(mass_SHN))](
        mass_SHN,
        q_M,
        k_E,
        log_sum_MH,
        _entries(sight),
        sight.see_M,
        _as_bytes(counts_M),
        _seat_rows(sight) if ragged else None,
        q_M.stride(0),
        q_M.stride(1),
        k_E.stride(0),
        k_E.stride(1),
        num_heads,
        num_positions,
        sight.num_keys,
        sight.per_seat or 0,
        LOG2_E / head_dim**0.5,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        RAGGED=ragged,
        PRECISION="ieee" if q_M.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
    )
    return _over_heads(mass_SHN, num_heads)


# Kernels


@triton.jit
def _entries_kernel(
    out, pages, shadow, pages_seat, shadow_seat, num_positions,
    PAGE_SIZE: tl.constexpr, SHADOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of positions, seats)."""
    pos = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seat = tl.program_id(1)
    here = pos < num_positions
    entry = tl.load(pages + seat * pages_seat + pos // PAGE_SIZE, mask=here, other=0) * PAGE_SIZE + pos % PAGE_SIZE
    if SHADOWED:
        shadowed = tl.load(shadow + seat * shadow_seat + pos, mask=here, other=0)
        entry = tl.where(shadowed != 0, -1, entry)
    tl.store(out + seat * num_positions + pos, entry, mask=here)


@triton.jit(do_not_specialize=["num_seats", "num_keys", "per_seat", "blocks_a_seat"])
def _blocks_kernel(
    out, num_rows, see, num_seats, num_keys, per_seat, blocks_a_seat,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows."""
    block = tl.program_id(0)
    if RAGGED:
        seat_S = tl.arange(0, BLOCK_S)
        rows_S = tl.load(num_rows + seat_S, mask=seat_S < num_seats, other=0).to(tl.int32)
        blocks_S = tl.cdiv(rows_S * GROUP, BLOCK_M)
        over_S = (tl.cumsum(blocks_S, 0) <= block) & (seat_S < num_seats)
        seat = tl.minimum(tl.sum(over_S.to(tl.int32), 0), num_seats - 1)
        first_row = tl.sum(tl.where(seat_S < seat, rows_S, 0), 0)
        end_row = first_row + tl.sum(tl.where(seat_S == seat, rows_S, 0), 0)
        first_packed = (block - tl.sum(tl.where(seat_S < seat, blocks_S, 0), 0)) * BLOCK_M
    else:
        seat = block // blocks_a_seat
        first_row = seat * per_seat
        end_row = first_row + per_seat
        first_packed = (block % blocks_a_seat) * BLOCK_M
    row_M = first_row + (first_packed + tl.arange(0, BLOCK_M)) // GROUP
    see_M = tl.minimum(tl.load(see + row_M, mask=row_M < end_row, other=0), num_keys)
    out += 6 * block
    tl.store(out, seat)
    tl.store(out + 1, first_row)
    tl.store(out + 2, end_row)
    tl.store(out + 3, first_packed)
    tl.store(out + 4, tl.max(see_M, 0))
    tl.store(out + 5, tl.min(tl.where(see_M > 0, see_M, num_keys), 0))


@triton.jit
def _fold(
    raw_MN, scale, v_ND, high_M, sum_M, acc_MD, MASKED: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr
):
    """One step of the online softmax over raw scores, -inf where unseen; logarithms are to base 2."""
    new_high_M = tl.maximum(high_M, tl.max(raw_MN, 1) * scale)
    base_M = new_high_M
    if MASKED:  # rows that saw nothing yet: no -inf - -inf
        base_M = tl.where(new_high_M == float("-inf"), 0.0, new_high_M)
    weight_MN = tl.exp2(raw_MN * scale - base_M[:, None])
    keep_M = tl.exp2(high_M - base_M)
    sum_M = sum_M * keep_M + tl.sum(weight_MN, 1)
    if VALUES:
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD * keep_M[:, None], input_precision=PRECISION)
    return new_high_M, sum_M, acc_MD


@triton.jit
def _keys(
    start, end, q_MD, k_D, v_D, entries, mass, see_M, sum_XD, sum_scale, mass_reach, high_M, sum_M, acc_MD,
    k_entry, v_entry, num_positions, scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, VALUES: tl.constexpr, MASS: tl.constexpr, ONE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The keys [start, end), with ``MASKED`` as far as each row sees them, else seen by all rows in whole steps."""
    key_N = tl.arange(0, BLOCK_N)
    # The next step's entries are read a step ahead, so the gathers below wait for no other load.
    entry_N = tl.load(entries + start + key_N, mask=start + key_N < num_positions, other=-1)
    for at in range(start, end, BLOCK_N):
        pos_N = at + key_N
        offset_N = entry_N
        if WIDE:
            offset_N = entry_N.to(tl.int64)
        k_ND, v_ND = k_D[None, :] + offset_N[:, None] * k_entry, v_D[None, :] + offset_N[:, None] * v_entry
        if MASKED:
            here_N = (entry_N >= 0) & (pos_N < end)
            k_ND = tl.load(k_ND, mask=here_N[:, None], other=0.0)
        else:
            k_ND = tl.load(k_ND)
        if VALUES:
            if MASKED:  # unseen values are zeros, not merely weighted with zero: 0 x NaN is NaN
                v_ND = tl.load(v_ND, mask=here_N[:, None], other=0.0)
            else:
                v_ND = tl.load(v_ND)
        else:
            v_ND = k_ND
        entry_N = tl.load(entries + BLOCK_N + pos_N, mask=BLOCK_N + pos_N < num_positions, other=-1)
        raw_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        if MASS:
            if ONE_BLOCK or at < mass_reach:
                column_N = tl.sum(tl.dot(sum_XD, tl.trans(k_ND), input_precision=PRECISION), 0) * sum_scale
                counted_N = pos_N < tl.minimum(mass_reach, end)
                # Nobody else adds to these sums: an addition that is sent off and not waited for, in a known order.
                tl.atomic_add(mass + pos_N, column_N, mask=counted_N, sem="relaxed")
        if MASKED:
            raw_MN = tl.where((pos_N[None, :] < see_M[:, None]) & here_N[None, :], raw_MN, float("-inf"))
        high_M, sum_M, acc_MD = _fold(raw_MN, scale, v_ND, high_M, sum_M, acc_MD, MASKED, VALUES, PRECISION)
    return high_M, sum_M, acc_MD


@triton.jit(do_not_specialize=["num_rows", "num_keys", "per_seat", "blocks_a_seat", "num_live"])
def _sweep_kernel(
    q, k, v, out, log_sum, mass, entries, see, blocks, live, bits, counts, query, counted_reach,
    q_row, q_head, k_entry, k_head, v_entry, v_head, bits_row,
    num_rows, num_heads, num_positions, num_keys, per_seat, blocks_a_seat, num_live, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
    NUM_SPLITS: tl.constexpr, RAGGED: tl.constexpr, SHADOWED: tl.constexpr, LIVE: tl.constexpr, VALUES: tl.constexpr,
    MASS: tl.constexpr, ONE_BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr, HAS_TABLES: tl.constexpr, BY_SEAT: tl.constexpr,
):  # fmt: skip
    """Grid: (key heads, splits, blocks of rows). Key heads run side by side, since an entry's heads lie side by side
    in memory: 8 KB for LLaDA."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not HAS_TABLES:
            tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    block = tl.program_id(2)
    blocks += 6 * (block // blocks_a_seat if BY_SEAT else block)
    if RAGGED:
        seat = tl.load(blocks)
        first_row = tl.load(blocks + 1)
        end_row = tl.load(blocks + 2)
        first_packed = tl.load(blocks + 3)
    else:  # computed, so that rows, queries and entries are asked for at once, not one wait later
        seat = block // blocks_a_seat
        first_row = seat * per_seat
        end_row = first_row + per_seat
        first_packed = (block % blocks_a_seat) * BLOCK_M
    reach = tl.load(blocks + 4)
    # Keys that all rows see need no mask. Padding, which sees none, goes along and is zeroed at the end.
    all_see = tl.load(blocks + 5)
    packed_M = first_packed + tl.arange(0, BLOCK_M)
    row_M = first_row + packed_M // GROUP
    head_M = kv_head * GROUP + packed_M % GROUP
    valid_M = row_M < end_row
    dim_D = tl.arange(0, HEAD_DIM)
    if PDL and HAS_TABLES and BY_SEAT:  # which rows these are was picked in this layer, how far they see with them
        tl.extra.cuda.gdc_wait()
    see_M = tl.minimum(tl.load(see + row_M, mask=valid_M, other=0), num_keys)
    if PDL and HAS_TABLES and not BY_SEAT:
        tl.extra.cuda.gdc_wait()
    q_MD = tl.load(
        q + row_M.to(tl.int64)[:, None] * q_row + head_M[:, None] * q_head + dim_D[None, :],
        mask=valid_M[:, None],
        other=0.0,
    )
    if not VALUES:
        counted_M = tl.load(counts + row_M, mask=valid_M, other=0) != 0
        reach = reach * tl.max(counted_M.to(tl.int32), 0)
    mass_reach, sum_scale = 0, 1.0
    sum_XD = q_MD
    if MASS:
        # One row in the matrix units' type, as a sum of three: to fp32's 24 bits, whatever the sum's size.
        if ONE_BLOCK:
            counted_M = tl.load(counts + row_M, mask=valid_M, other=0) != 0
            sum_D = tl.sum(tl.where(counted_M[:, None], q_MD.to(tl.float32), 0.0), 0)
            mass_reach = tl.max(tl.where(counted_M, see_M, 0), 0)
        else:
            sum_D = tl.load(query + (seat * tl.num_programs(0) + kv_head) * HEAD_DIM + dim_D)
            if first_packed == 0:
                mass_reach = tl.load(counted_reach + seat)
                reach = tl.maximum(reach, mass_reach)
        sum_scale = tl.max(tl.abs(sum_D), 0)
        sum_D = sum_D / tl.where(sum_scale > 0, sum_scale, 1.0)
        high_D = sum_D.to(q_MD.dtype)
        middle_D = (sum_D - high_D).to(q_MD.dtype)
        low_D = (sum_D - high_D - middle_D).to(q_MD.dtype)
        part_X = tl.arange(0, 16)[:, None]
        sum_XD = tl.where(part_X == 0, high_D[None, :], tl.where(part_X == 1, middle_D[None, :], low_D[None, :]))
        sum_XD = tl.where(part_X < 3, sum_XD, 0.0).to(q_MD.dtype)
        mass += (seat * tl.num_programs(0) + kv_head).to(tl.int64) * num_positions

    start, end = 0, reach
    if NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(reach, BLOCK_N), NUM_SPLITS) * BLOCK_N
        start = split * share
        end = tl.minimum(reach, start + share)
    high_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    k_D = k + kv_head * k_head + dim_D
    v_D = v + kv_head * v_head + dim_D
    entries += seat * num_positions
    plain_end = start
    if not (SHADOWED or LIVE):  # a row that sees live entries alone is no padding: it must not go along
        # Whole steps of keys that all rows see: no mask, and no branch between the products.
        plain_end = start + tl.maximum(tl.minimum(end, all_see) - start, 0) // BLOCK_N * BLOCK_N
        high_M, sum_M, acc_MD = _keys(
            start, plain_end, q_MD, k_D, v_D, entries, mass, see_M, sum_XD, sum_scale, mass_reach, high_M, sum_M,
            acc_MD, k_entry, v_entry, num_positions, scale, BLOCK_N, False, VALUES, MASS, ONE_BLOCK, PRECISION, WIDE,
        )  # fmt: skip
    # Without this question the assembler takes the products of the loop before for unfinished, and puts all of them one
    # behind the other.
    if plain_end < end:
        high_M, sum_M, acc_MD = _keys(
            plain_end, end, q_MD, k_D, v_D, entries, mass, see_M, sum_XD, sum_scale, mass_reach, high_M, sum_M, acc_MD,
            k_entry, v_entry, num_positions, scale, BLOCK_N, True, VALUES, MASS, ONE_BLOCK, PRECISION, WIDE,
        )  # fmt: skip

    if LIVE:
        # A loop, though most lists fit one step, and behind a question, for the same reason.
        listed = num_live * (split == NUM_SPLITS - 1)  # the share that rounding leaves shortest
        if listed > 0:
            for first in range(0, listed, BLOCK_J):
                live_J = first + tl.arange(0, BLOCK_J)
                seen_MJ = tl.load(
                    bits + row_M.to(tl.int64)[:, None] * bits_row + live_J[None, :],
                    mask=valid_M[:, None] & (live_J < num_live)[None, :],
                    other=0,
                ) != 0  # fmt: skip
                read_J = tl.max(seen_MJ.to(tl.int32), 0) > 0
                entry_J = tl.load(live + seat * num_live + live_J, mask=live_J < num_live, other=0)
                k_JD = tl.load(k_D[None, :] + entry_J[:, None] * k_entry, mask=read_J[:, None], other=0.0)
                v_JD = k_JD
                if VALUES:
                    v_JD = tl.load(v_D[None, :] + entry_J[:, None] * v_entry, mask=read_J[:, None], other=0.0)
                raw_MJ = tl.dot(q_MD, tl.trans(k_JD), input_precision=PRECISION)
                raw_MJ = tl.where(seen_MJ, raw_MJ, float("-inf"))
                high_M, sum_M, acc_MD = _fold(raw_MJ, scale, v_JD, high_M, sum_M, acc_MD, True, VALUES, PRECISION)

    seeing_M = sum_M > 0
    if not LIVE:
        seeing_M = seeing_M & (see_M > 0)
    place_M = row_M.to(tl.int64) * num_heads + head_M
    if NUM_SPLITS > 1:
        place_M += split * num_rows.to(tl.int64) * num_heads
    if VALUES:
        acc_MD = tl.where(seeing_M[:, None], acc_MD / tl.where(seeing_M, sum_M, 1.0)[:, None], 0.0)
        out_MD = out + place_M[:, None] * HEAD_DIM + dim_D[None, :]
        tl.store(out_MD, acc_MD.to(out.dtype.element_ty), mask=valid_M[:, None])
    if NUM_SPLITS > 1 or not VALUES:
        log_sum_M = tl.where(seeing_M, high_M + tl.log2(tl.where(seeing_M, sum_M, 1.0)), float("-inf"))
        tl.store(log_sum + place_M, log_sum_M, mask=valid_M)


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    part, log_sum, out, num_rows, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of heads). The splits' outputs, weighted by their share of the softmax's denominator."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid_H = head_H < num_heads
    dim_D = tl.arange(0, HEAD_DIM)
    place_H = tl.program_id(0).to(tl.int64) * num_heads + head_H
    step = num_rows.to(tl.int64) * num_heads
    high_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        high_H = tl.maximum(high_H, tl.load(log_sum + split * step + place_H, mask=valid_H, other=float("-inf")))
    high_H = tl.where(high_H == float("-inf"), 0.0, high_H)
    sum_H = tl.zeros([BLOCK_H], tl.float32)
    acc_HD = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        at_H = split * step + place_H
        weight_H = tl.exp2(tl.load(log_sum + at_H, mask=valid_H, other=float("-inf")) - high_H)
        part_HD = tl.load(part + at_H[:, None] * HEAD_DIM + dim_D[None, :], mask=valid_H[:, None], other=0.0)
        sum_H += weight_H
        acc_HD += weight_H[:, None] * part_HD
    acc_HD = acc_HD / tl.where(sum_H > 0, sum_H, 1.0)[:, None]
    out_HD = out + place_H[:, None] * HEAD_DIM + dim_D[None, :]
    tl.store(out_HD, acc_HD.to(out.dtype.element_ty), mask=valid_H[:, None])


@triton.jit
def _rows_of(rows, seat, per_seat, RAGGED: tl.constexpr):
    """A seat's first row and the row after its last."""
    if RAGGED:
        first_row = tl.load(rows + 2 * seat)
        end_row = tl.load(rows + 2 * seat + 1)
    else:
        first_row = seat * per_seat
        end_row = first_row + per_seat
    return first_row, end_row


@triton.jit(do_not_specialize=["per_seat", "num_keys"])
def _query_sum_kernel(
    query, reach, q, see, counts, rows, q_row, q_head, per_seat, num_keys,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Grid: (key heads, seats). The counted rows' queries under a key head, summed; and how far those rows see."""
    kv_head = tl.program_id(0)
    seat = tl.program_id(1)
    first_row, end_row = _rows_of(rows, seat, per_seat, RAGGED)
    dim_D = tl.arange(0, HEAD_DIM)
    sum_D = tl.zeros([HEAD_DIM], tl.float32)
    reach_M = tl.zeros([BLOCK_M], tl.int32)
    for first_packed in range(0, (end_row - first_row) * GROUP, BLOCK_M):
        packed_M = first_packed + tl.arange(0, BLOCK_M)
        row_M = first_row + packed_M // GROUP
        counted_M = tl.load(counts + row_M, mask=row_M < end_row, other=0) != 0
        head_M = kv_head * GROUP + packed_M % GROUP
        q_MD = q + row_M.to(tl.int64)[:, None] * q_row + head_M[:, None] * q_head + dim_D[None, :]
        sum_D += tl.sum(tl.load(q_MD, mask=counted_M[:, None], other=0.0).to(tl.float32), 0)
        reach_M = tl.maximum(reach_M, tl.load(see + row_M, mask=counted_M, other=0))
    tl.store(query + (seat * tl.num_programs(0) + kv_head) * HEAD_DIM + dim_D, sum_D)
    if kv_head == 0:
        tl.store(reach + seat, tl.minimum(tl.max(reach_M, 0), num_keys))


@triton.jit
def _raw_mass_kernel(
    mass, k, query, reach, entries, k_entry, k_head, num_positions, scale,
    HEAD_DIM: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of positions, seats). Seats in which nobody counts read no key."""
    seat = tl.program_id(1)
    pos_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = pos_N < num_positions
    column_C = tl.arange(0, BLOCK_C)
    entry_N = tl.load(entries + seat * num_positions + pos_N, mask=inside_N & (pos_N < tl.load(reach + seat)), other=-1)
    here_N = entry_N >= 0
    mass_NC = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for first in tl.static_range(0, NUM_COLUMNS, BLOCK_C):
        at_C = first + column_C
        k_NC = tl.load(
            k + entry_N.to(tl.int64)[:, None] * k_entry + ((at_C // HEAD_DIM) * k_head + at_C % HEAD_DIM)[None, :],
            mask=here_N[:, None] & (at_C < NUM_COLUMNS)[None, :],
            other=0.0,
        )
        query_C = tl.load(query + seat * NUM_COLUMNS + at_C, mask=at_C < NUM_COLUMNS, other=0.0)
        mass_NC += k_NC.to(tl.float32) * query_C[None, :]
    tl.store(mass + seat * num_positions + pos_N, tl.sum(mass_NC, 1) * scale, mask=inside_N)


@triton.jit
def _over_heads_kernel(
    out, mass, num_positions, num_kv_heads, scale,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of positions, seats)."""
    seat = tl.program_id(1)
    pos_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head_H = tl.arange(0, BLOCK_H)
    mass += seat.to(tl.int64) * num_kv_heads * num_positions
    mass_HN = tl.load(
        mass + head_H[:, None] * num_positions + pos_N[None, :],
        mask=(head_H < num_kv_heads)[:, None] & (pos_N < num_positions)[None, :],
        other=0.0,
    )
    tl.store(out + seat * num_positions + pos_N, tl.sum(mass_HN, 0) * scale, mask=pos_N < num_positions)


@triton.jit(do_not_specialize=["num_keys", "per_seat"])
def _softmax_mass_kernel(
    part, q, k, log_sum, entries, see, counts, rows, q_row, q_head, k_entry, k_head,
    num_heads, num_positions, num_keys, per_seat, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (key heads, blocks of positions, seats). Blocks of rows in which nobody counts are passed over."""
    kv_head = tl.program_id(0)
    seat = tl.program_id(2)
    first_row, end_row = _rows_of(rows, seat, per_seat, RAGGED)
    pos_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim_D = tl.arange(0, HEAD_DIM)
    entry_N = tl.load(entries + seat * num_positions + pos_N, mask=pos_N < num_keys, other=-1)
    here_N = entry_N >= 0
    k_ND = k + kv_head * k_head + entry_N.to(tl.int64)[:, None] * k_entry + dim_D[None, :]
    k_ND = tl.load(k_ND, mask=here_N[:, None], other=0.0)
    mass_N = tl.zeros([BLOCK_N], tl.float32)
    for first_packed in range(0, (end_row - first_row) * GROUP, BLOCK_M):
        packed_M = first_packed + tl.arange(0, BLOCK_M)
        row_M = first_row + packed_M // GROUP
        head_M = kv_head * GROUP + packed_M % GROUP
        counted_M = tl.load(counts + row_M, mask=row_M < end_row, other=0) != 0
        if tl.max(counted_M.to(tl.int32), 0) > 0:
            q_MD = q + row_M.to(tl.int64)[:, None] * q_row + head_M[:, None] * q_head + dim_D[None, :]
            q_MD = tl.load(q_MD, mask=counted_M[:, None], other=0.0)
            see_M = tl.minimum(tl.load(see + row_M, mask=counted_M, other=0), num_keys)
            place_M = row_M.to(tl.int64) * num_heads + head_M
            log_sum_M = tl.load(log_sum + place_M, mask=counted_M, other=0.0)
            raw_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
            seen_MN = (pos_N[None, :] < see_M[:, None]) & here_N[None, :]
            mass_N += tl.sum(tl.where(seen_MN, tl.exp2(raw_MN * scale - log_sum_M[:, None]), 0.0), 0)
    part += (seat * tl.num_programs(0) + kv_head).to(tl.int64) * num_positions
    tl.store(part + pos_N, mass_N, mask=pos_N < num_positions)
