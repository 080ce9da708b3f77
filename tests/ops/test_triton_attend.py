"""The Triton kernels of `attend` and `tracking_mass` against the reference: in the interpreter on the CPU (fp32 and
fp16: its bf16 is silently wrong), as compiled kernels where there is a GPU. Memory that a kernel is to fill holds NaN.

M rows, S seats, N positions, E entries of the pool, J live entries, H query heads, Hkv key heads, hd head size
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.conftest import DEVICE, load_kernels
from ops.test_attend import Case, fixed, make, real_rows
from unmask import ops
from unmask.ops.reference import attend as reference
from unmask.ops.reference.drift import picked

kernels = load_kernels("attend")
triton = pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")

ROWS = (5, 0, 21, 1)
WHOLE, SHARED = kernels.Tile(16, 16, 1, 4, 1), kernels.Tile(16, 16, 2, 4, 1)


def sample(
    rows: tuple[int, ...] = ROWS,
    heads: tuple[int, int] = (4, 2),
    num_live: int | None = 5,
    *,
    head_dim: int = 16,
    seed: int = 0,
    per_seat: int | None = None,
    num_pages: int = 7,
) -> Case:
    """A case of `ops.test_attend` over 5 * 7 positions (tiles have 16 keys), with heads that a kernel takes."""
    case = make(rows, heads, num_live, seed, page_size=5, num_pages=num_pages, per_seat=per_seat)
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (len(case.k_E), heads[1], head_dim)
    return replace(case, q_M=randn(len(case.q_M), heads[0], head_dim), k_E=randn(*shape), v_E=randn(*shape))


def on_device(sight: reference.Sight) -> reference.Sight:
    tensors = {name: value for name, value in vars(sight).items() if isinstance(value, Tensor)}
    return replace(sight, **{name: value.to(DEVICE) for name, value in tensors.items()})  # type: ignore[arg-type]


def off_device(sight: reference.Sight) -> reference.Sight:
    tensors = {name: value.cpu() for name, value in vars(sight).items() if isinstance(value, Tensor)}
    return replace(sight, **tensors, whole=None)  # type: ignore[arg-type]


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, reference.Sight]:
    """None of them dense, each with strides of its own."""
    q_M, k_E, v_E = case.q_M.to(DEVICE, dtype), case.k_E.to(DEVICE, dtype), case.v_E.to(DEVICE, dtype)
    (_, num_heads, head_dim), num_kv_heads = q_M.shape, k_E.shape[1]
    q_M = torch.cat((q_M, q_M.flip(1)), 1)[:, :num_heads]
    k_E = torch.cat((k_E, k_E.flip(0)), 2)[..., :head_dim]
    v_E = torch.cat((v_E, v_E.flip(0), v_E), 1)[:, :num_kv_heads]
    return q_M, k_E, v_E, on_device(case.sight)


def attend(case: Case, tile: kernels.Tile = WHOLE, dtype: torch.dtype = torch.float32) -> Tensor:
    out_M = kernels.attend_in_tiles(*inputs(case, dtype), tile)
    assert out_M.dtype == dtype
    return out_M.cpu()


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The numbers that a kernel of this type gets."""
    q_M, k_E, v_E = (each.to(dtype).double() for each in (case.q_M, case.k_E, case.v_E))
    return replace(case, q_M=q_M, k_E=k_E, v_E=v_E)


def close(ours: Tensor, exact: Tensor, bound: float = 1e-5) -> None:
    """NaN is never close."""
    error = (ours.double() - exact).norm() / exact.norm().clamp(min=1e-9)
    assert error < bound, f"off by {error:.1e}"


# attend


@pytest.mark.parametrize("tile", [WHOLE, SHARED])
@pytest.mark.parametrize(
    ("heads", "num_live", "per_seat"),
    [
        ((2, 2), None, None),
        ((2, 2), None, 22),
        ((4, 2), 5, None),
        ((2, 1), 5, 21),
        ((3, 1), 17, None),
        ((3, 1), 0, 23),
        ((4, 2), 70, None),
        ((2, 1), 150, 21),
    ],
)
def test_attend_is_the_reference(
    heads: tuple[int, int], num_live: int | None, per_seat: int | None, tile: kernels.Tile
) -> None:
    """Seats with no, one and many rows, more than a block of them; a live list longer than the smallest tile."""
    case = sample(heads=heads, num_live=num_live, per_seat=per_seat)
    close(attend(case, tile), reference.attend(case.q_M, case.k_E, case.v_E, case.sight))


@pytest.mark.parametrize(("head_dim", "num_live"), [(16, None), (32, 1), (64, 64), (128, None)])
def test_half_precision(head_dim: int, num_live: int | None) -> None:
    """Weights are rounded to fp16 before they meet the values: 2^-11 each."""
    case = rounded(sample((3, 9), num_live=num_live, head_dim=head_dim), torch.float16)
    exact = reference.attend(case.q_M, case.k_E, case.v_E, case.sight)
    close(attend(case, SHARED, torch.float16), exact, 2e-3)


def test_the_chosen_tile_is_the_reference() -> None:
    case = sample((70, 3), (2, 1))
    q_M, k_E, v_E, sight = inputs(case, torch.float32)
    close(kernels.attend(q_M, k_E, v_E, sight).cpu(), reference.attend(case.q_M, case.k_E, case.v_E, case.sight))


def test_nothing_is_seen_beyond_the_extent() -> None:
    """In the middle of a step of keys."""
    case = sample((6, 3), (2, 1), None, per_seat=7)
    case = case.looking(num_keys=21)
    assert int(case.sight.see_M.max()) > 21
    close(attend(case, SHARED), reference.attend(case.q_M, case.k_E, case.v_E, case.sight))


def test_more_splits_than_keys() -> None:
    """A share without keys gives nothing, and takes nothing from the others."""
    case = sample((3, 2), num_live=None, num_pages=1)
    tile = kernels.Tile(16, 16, 8, 4, 1)
    close(attend(case, tile), reference.attend(case.q_M, case.k_E, case.v_E, case.sight))


def test_offsets_beyond_32_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case, launches = sample(), []
    launch = type(kernels._sweep_kernel).__getitem__
    narrow_M = attend(case)

    def recorded(kernel: Any, grid: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            launches.append(kwargs.get("WIDE"))
            return launch(kernel, grid)(*args, **kwargs | ({"WIDE": True} if "WIDE" in kwargs else {}))

        return run

    monkeypatch.setattr(type(kernels._sweep_kernel), "__getitem__", recorded)
    assert torch.equal(attend(case), narrow_M)
    assert False in launches


@pytest.mark.parametrize(
    ("per_seat", "num_live", "tile"),
    [(None, None, WHOLE), (None, 3, SHARED), (12, None, SHARED), (12, 3, WHOLE), (12, None, WHOLE)],
)
def test_rows_that_see_nothing_are_zero(num_live: int | None, per_seat: int | None, tile: kernels.Tile) -> None:
    """Exactly, and so is padding: rows without reach share their tile with rows that see every key of it."""
    case = sample((6, 3, 11), num_live=num_live)
    see_M = case.sight.see_M.clone()
    see_M[6:9] = 0
    see_M[[1, 4, 10]] = 0
    changes: dict[str, Any] = {}
    if num_live is not None:
        bits_MJ = case.sight.live_bits_MJ.clone()  # type: ignore[union-attr]
        bits_MJ[[1, 4, *range(6, 9), 10]] = False
        bits_MJ[11] = True
        see_M[11] = 0  # sees live entries alone
        changes = {"live_bits_MJ": bits_MJ}
    case = case.looking(see_M=see_M, **changes)
    exact = reference.attend(case.q_M, case.k_E, case.v_E, case.sight)
    blind = [row for row in range(20) if not case.seen(row)]
    assert {1, 4, 6, 7, 8, 10} <= set(blind)
    out_M = attend(case if per_seat is None else fixed(case, per_seat), tile)
    if per_seat is not None:
        real = real_rows(case, per_seat)
        assert not out_M[~real].any()
        out_M = out_M[real]
    assert not out_M[blind].any()
    close(out_M, exact)


def test_a_pass_that_sees_nothing_and_a_pass_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sample((2, 5), num_live=None)
    blind = case.looking(see_M=torch.zeros_like(case.sight.see_M), num_keys=0)
    assert torch.equal(attend(blind, SHARED), torch.zeros(7, 4, 16))
    empty = sample((0, 0))
    assert attend(empty).shape == (0, 4, 16)
    q_M, k_E, v_E, sight = inputs(empty, torch.float32)
    monkeypatch.setattr(ops, "kernel", lambda *_: kernels)
    for softmax in (False, True):
        assert ops.attend(q_M, k_E, v_E, sight, ops.MassSum(empty.counts_M.to(DEVICE), softmax)).shape == (0, 4, 16)
        assert not ops.tracking_mass(q_M, k_E, sight, empty.counts_M.to(DEVICE), softmax=softmax).any()


@pytest.mark.parametrize(
    ("per_seat", "num_live", "tile"), [(None, None, WHOLE), (None, 4, SHARED), (22, None, SHARED), (22, 4, WHOLE)]
)
def test_what_nobody_sees_may_be_nan(per_seat: int | None, num_live: int | None, tile: kernels.Tile) -> None:
    """Beyond every row's reach, shadowed, live without a bit, or on the trash page: not a bit changes."""
    case = sample(heads=(2, 1), num_live=num_live, per_seat=per_seat)
    if num_live is not None:
        bits_MJ = case.sight.live_bits_MJ.clone()  # type: ignore[union-attr]
        bits_MJ[:, 1] = False
        case = case.looking(live_bits_MJ=bits_MJ)
    case = case.looking(see_M=case.sight.see_M.clamp(max=27))
    seen = {entry for row in range(len(case.q_M)) for entry in case.seen(row)}
    hidden = sorted(set(range(len(case.k_E))) - seen)
    assert len(hidden) > 10
    k_E, v_E = case.k_E.clone(), case.v_E.clone()
    k_E[hidden], v_E[hidden] = torch.nan, torch.nan
    assert torch.equal(attend(replace(case, k_E=k_E, v_E=v_E), tile), attend(case, tile))


def test_what_a_row_does_not_see_changes_no_bit_of_it() -> None:
    case = sample((6, 0, 1, 8), (2, 1), num_live=4)
    before_M = attend(case)
    for row in (0, 3, 6, 9):
        hidden = sorted(set(range(len(case.k_E))) - set(case.seen(row)))
        k_E, v_E = case.k_E.clone(), case.v_E.clone()
        k_E[hidden], v_E[hidden] = 1e4, -1e4
        assert torch.equal(attend(replace(case, k_E=k_E, v_E=v_E))[row], before_M[row])


CHANGES: dict[str, Callable[[Case], Case]] = {
    "q": lambda case: replace(case, q_M=case.q_M.flip(1)),
    "k": lambda case: replace(case, k_E=case.k_E.flip(0)),
    "v": lambda case: replace(case, v_E=case.v_E.flip(0)),
    "see": lambda case: case.looking(see_M=(case.sight.see_M - 1).clamp(min=0)),
    "num_rows": lambda case: case.looking(num_rows_S=torch.tensor([5, 0, 20, 2])),
    "page_table": lambda case: case.looking(page_table_SP=case.sight.page_table_SP.roll(1, 0)),
    "live": lambda case: case.looking(live_SJ=case.sight.live_SJ.roll(1, 0)),  # type: ignore[union-attr]
    "no live": lambda case: case.looking(live_SJ=None, live_bits_MJ=None),
    "bits": lambda case: case.looking(live_bits_MJ=~case.sight.live_bits_MJ),  # type: ignore[operator]
    "shadow": lambda case: case.looking(shadow_SN=case.sight.shadow_SN.roll(1, 1)),  # type: ignore[union-attr]
    "no shadow": lambda case: case.looking(shadow_SN=None),
    "num_keys": lambda case: case.looking(num_keys=case.sight.num_keys - 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_kernel_reads_every_argument(change: str) -> None:
    """Negative control: with one argument changed it is not the reference's result of the call as it was."""
    case = sample()
    with pytest.raises(AssertionError, match="off by"):
        close(attend(CHANGES[change](case)), reference.attend(case.q_M, case.k_E, case.v_E, case.sight))


def test_an_unwritten_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the poison: one block of rows too few."""
    case = sample()
    blocks = kernels._make_blocks
    monkeypatch.setattr(kernels, "_make_blocks", lambda *args: blocks(*args)[:3].contiguous())
    with pytest.raises(AssertionError, match="off by nan"):
        close(attend(case), reference.attend(case.q_M, case.k_E, case.v_E, case.sight))


# Mass


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(
    ("heads", "num_live", "per_seat"), [((2, 2), None, None), ((4, 2), 5, None), ((3, 1), None, 22), ((4, 2), 5, 21)]
)
def test_mass_is_the_reference(
    heads: tuple[int, int], num_live: int | None, per_seat: int | None, softmax: bool
) -> None:
    case = sample(heads=heads, num_live=num_live, per_seat=per_seat, seed=3)
    exact_SN = reference.tracking_mass(case.q_M, case.k_E, case.sight, case.counts_M, softmax=softmax)
    q_M, k_E, _, sight = inputs(case, torch.float32)
    counts_M = case.counts_M.to(DEVICE)
    mass_SN = kernels.tracking_mass(q_M, k_E, sight, counts_M, softmax=softmax).cpu()
    assert mass_SN.dtype == torch.float32
    close(mass_SN, exact_SN)
    assert torch.equal(mass_SN == 0, exact_SN == 0)
    with pytest.raises(AssertionError, match="off by"):  # the rows next to them
        close(kernels.tracking_mass(q_M, k_E, sight, counts_M.roll(1), softmax=softmax).cpu(), exact_SN)


@pytest.mark.parametrize(
    ("heads", "num_live", "per_seat", "tile"),
    [((4, 2), None, 34, SHARED), ((2, 1), 5, None, WHOLE), ((2, 2), 5, 34, WHOLE), ((3, 1), None, None, SHARED)],
)
def test_attention_and_mass_in_one_sweep(
    heads: tuple[int, int], num_live: int | None, per_seat: int | None, tile: kernels.Tile
) -> None:
    """Counted rows in several blocks of a seat, with different reaches: each position that one of them sweeps counts
    them all, and the first block sees less than they do."""
    case = sample((20, 0, 33, 5), heads, num_live, seed=4)
    see_M = case.sight.see_M.clone()
    see_M[20:36] = 9
    case = case.looking(see_M=see_M)
    case = case if per_seat is None else fixed(case, per_seat)
    exact_SN = reference.tracking_mass(case.q_M, case.k_E, case.sight, case.counts_M)
    out_M, mass_SN = kernels.attend_and_mass(*inputs(case, torch.float32), case.counts_M.to(DEVICE), tile)
    close(out_M.cpu(), reference.attend(case.q_M, case.k_E, case.v_E, case.sight))
    close(mass_SN.cpu(), exact_SN)
    assert torch.equal(mass_SN.cpu() == 0, exact_SN == 0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 200.0])
def test_the_row_of_the_mass_has_the_bits_of_fp32(size: float) -> None:
    """A sum of queries is no fp16: neither its size nor its bits fit."""
    case = sample((30, 9), (4, 1), None)
    case = rounded(replace(case, q_M=case.q_M.abs() * size, counts_M=torch.ones(39, dtype=torch.bool)), torch.float16)
    exact_SN = reference.tracking_mass(case.q_M, case.k_E, case.sight, case.counts_M)
    _, mass_SN = kernels.attend_and_mass(*inputs(case, torch.float16), case.counts_M.to(DEVICE), WHOLE)
    close(mass_SN.cpu(), exact_SN, 1e-6)


def test_mass_of_half_precision_is_summed_in_fp32() -> None:
    case = rounded(sample((12, 9), num_live=None), torch.float16)
    q_M, k_E, _, sight = inputs(case, torch.float16)
    for softmax in (False, True):
        mass_SN = kernels.tracking_mass(q_M, k_E, sight, case.counts_M.to(DEVICE), softmax=softmax)
        assert mass_SN.dtype == torch.float32
        exact_SN = reference.tracking_mass(case.q_M, case.k_E, case.sight, case.counts_M, softmax=softmax)
        close(mass_SN.cpu(), exact_SN)


# Launching


def test_tables_are_made_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = sample((2, 5), (2, 1), num_pages=2, per_seat=5), []
    for name in ("_make_entries", "_make_blocks"):
        make_table = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, make_table=make_table: made.append(1) or make_table(*a))
    q_M, k_E, v_E, sight = inputs(case, torch.float32)
    counts_M = case.counts_M.to(DEVICE)
    for _ in range(3):
        kernels.attend_and_mass(q_M, k_E, v_E, sight, counts_M, WHOLE)
    assert len(made) == 2
    kernels.attend_in_tiles(q_M, k_E, v_E, replace(sight), WHOLE)
    assert len(made) == 4


def packed(sight: reference.Sight, most: int, seed: int) -> tuple[Tensor, reference.Sight]:
    """About half of a pass's rows of fixed shape, and what they see."""
    assert sight.per_seat is not None
    chosen_M = (torch.rand(len(sight.see_M), generator=torch.Generator().manual_seed(seed)) < 0.5).to(DEVICE)
    part = picked(chosen_M, sight.per_seat, most, torch.ones_like(sight.seat_M), sight.see_M)
    return part.rows_P, sight.part(part.seat_P, part.see_P, part.num_S, most)


@pytest.mark.parametrize("tile", [WHOLE, SHARED])
@pytest.mark.parametrize(("heads", "per_seat"), [((2, 2), 22), ((3, 1), 23)])
def test_parts_of_a_pass_share_its_tables(
    heads: tuple[int, int], per_seat: int, tile: kernels.Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows picked anew in each layer, never as many twice: one table of entries, and one that says how far seats see
    beside the whole's own."""
    made: list[str] = []
    for name in ("_make_entries", "_make_blocks"):
        make_table = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, make_table=make_table, name=name: made.append(name) or make_table(*a)
        )
    q_M, k_E, v_E, sight = inputs(sample(heads=heads, num_live=None, per_seat=per_seat), torch.float32)
    kernels.attend_in_tiles(q_M, k_E, v_E, sight, tile)
    for most in (1, 9, per_seat):
        rows_P, part = packed(sight, most, seed=most)
        exact = reference.attend(*(each.cpu().double() for each in (q_M[rows_P], k_E, v_E)), off_device(part))
        close(kernels.attend_in_tiles(q_M[rows_P], k_E, v_E, part, tile).cpu(), exact)
    assert made == ["_make_blocks", "_make_entries", "_make_blocks"]


def test_ragged_parts_share_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks depend on how many rows they have."""
    made: list[int] = []
    make_entries = kernels._make_entries
    monkeypatch.setattr(kernels, "_make_entries", lambda *a: made.append(1) or make_entries(*a))
    q_M, k_E, v_E, sight = inputs(sample(heads=(4, 2), num_live=None), torch.float32)
    for step in (2, 3):
        rows_P = torch.arange(len(q_M), device=DEVICE)[::step]
        seat_P, see_P = sight.seat_M[rows_P], sight.see_M[rows_P]
        part = sight.part(seat_P, see_P, torch.bincount(seat_P, minlength=len(ROWS)), None)
        exact = reference.attend(*(each.cpu().double() for each in (q_M[rows_P], k_E, v_E)), off_device(part))
        close(kernels.attend(q_M[rows_P], k_E, v_E, part).cpu(), exact)
        all_P = torch.ones(len(rows_P), dtype=torch.bool, device=DEVICE)
        exact = reference.tracking_mass(
            q_M[rows_P].cpu().double(), k_E.cpu().double(), off_device(part), all_P.cpu(), softmax=True
        )
        close(kernels.tracking_mass(q_M[rows_P], k_E, part, all_P, softmax=True).cpu(), exact)
    assert len(made) == 1


def test_the_mass_of_no_rows() -> None:
    q_M, k_E, _, sight = inputs(sample(heads=(4, 2), num_live=None), torch.float32)
    none_P = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    part = sight.part(none_P, sight.see_M[none_P], torch.zeros_like(sight.num_rows_S), None)
    assert not kernels.tracking_mass(q_M[none_P], k_E, part, none_P.bool(), softmax=True).any()


def test_few_rows_are_shared_and_many_are_not() -> None:
    """Every processor of an H200 has work, and none has less than 128 keys."""

    def splits(seats: int, rows: int, keys: int = 1536, heads: int = 32) -> int:
        return kernels._tile_for(rows, seats * heads, keys, False, 132).num_splits

    assert [splits(seats, 128) for seats in (1, 2, 4, 8, 32)] == [4, 2, 1, 1, 1]
    assert splits(1, 16) == 4
    assert splits(1, 64) == 8
    assert splits(1, 128, keys=512) == 4
    assert splits(1, 128, keys=100) == 1
    assert splits(1, 900, heads=4) == 4


def test_what_the_kernels_take() -> None:
    case = sample((2, 3))
    q_M, k_E, v_E = case.q_M.float(), case.k_E.float(), case.v_E.float()
    assert kernels.supported(q_M, k_E, v_E)
    assert not kernels.supported(q_M.double(), k_E.double(), v_E.double())
    assert not kernels.supported(q_M.half(), k_E, v_E)
    assert not kernels.supported(q_M[..., :12], k_E[..., :12], v_E[..., :12])
    assert not kernels.supported(q_M.clone().requires_grad_(), k_E, v_E)


COMPILE = """
import json, os, subprocess, tempfile, torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class H200:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=0: 0

def launch(self, grid):
    def run(*args, **kwargs):
        made = self.warmup(*args, grid=grid, **kwargs)
        found.append((self.__name__, kwargs.get("BLOCK_M"), made.metadata.shared, made.asm["ptx"]))
    return run

def assembled(ptx):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", path, "-o", os.path.join(folder, "kernel")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

driver.set_active(H200())
JITFunction.__getitem__ = launch
found = []
from ops.conftest import DEVICE, load_kernels
from ops.test_attend import make
from unmask.ops.reference.drift import picked
from unmask.ops.triton import attend as kernels, launch
launch.early = lambda device: True
for heads, num_live, per_seat in (((4, 4), None, 128), ((14, 2), 5, None)):
    case = make((5, 0, 100), heads, num_live, page_size=16, per_seat=per_seat)
    q_M = torch.zeros(len(case.q_M), heads[0], 128, dtype=torch.bfloat16)
    k_E = torch.zeros(len(case.k_E), heads[1], 128, dtype=torch.bfloat16)
    if per_seat:
        for num_sweeps in (999, 32):
            for mass in (False, True):
                tile = kernels._tile_for(128, num_sweeps, 1536, False, 132)
                if mass:
                    kernels.attend_and_mass(q_M, k_E, k_E, case.sight, case.counts_M, tile)
                else:
                    kernels.attend_in_tiles(q_M, k_E, k_E, case.sight, tile)
        each = picked(case.counts_M, 128, 32, case.sight.seat_M, case.sight.see_M)
        part = case.sight.part(each.seat_P, each.see_P, each.num_S, 32)
        for layer in range(2):
            kernels.attend_in_tiles(q_M[each.rows_P], k_E, k_E, part, kernels._tile_for(32, 12, 1536, False, 132))
    else:
        kernels.attend_in_tiles(q_M, k_E, k_E, case.sight, kernels._tile_for(64, 8, 1536, False, 132))
        kernels.tracking_mass(q_M, k_E, case.sight, case.counts_M)
        kernels.tracking_mass(q_M, k_E, case.sight, case.counts_M, softmax=True)
print(json.dumps([
    (
        name, block_m, shared, "wgmma.mma_async" in ptx, "cp.async.cg" in ptx, "serialized" in assembled(ptx),
        ptx.partition("griddepcontrol.wait")[0].count("ld.global"),
    )
    for name, block_m, shared, ptx in found
]))
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="knows Triton 3.6 from inside")
def test_every_kernel_compiles_for_an_h200() -> None:
    """The interpreter takes more than the compiler does. A program with 128 rows, or two with 64, must fit a processor:
    227 KB. And the assembler must let products overlap: it looks at how they are written, and only warns."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    written = {name for name in vars(kernels) if name.endswith("_kernel")}
    assert {name for name, *_ in found} == written
    sweeps = [each for each in found if each[0] == "_sweep_kernel"]
    assert len(sweeps) == 8
    # Before the kernel in front has ended a part reads how far the whole's rows see, and nothing of its own rows: those
    # were picked in this layer. The whole reads how far each of its rows sees, too.
    _, whole, *_, first_part, second_part, _, _ = (each[-1] for each in sweeps)
    assert first_part == second_part == 2 < whole
    for _, block_m, shared, on_matrix_units, asynchronous, serialized, _ in sweeps:
        assert on_matrix_units
        assert asynchronous
        assert not serialized
        assert (128 // block_m) * (shared + 1024) <= 227 * 1024
