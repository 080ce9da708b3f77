"""The Triton kernels of `drift`, `furthest` and `picked` against the reference: interpreted on the CPU, compiled where
there is a GPU.

M rows, R numbers of a row, E entries, S seats
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.conftest import DEVICE, DTYPES, compile_for_h200, load_kernels
from unmask.ops.reference import drift as reference

kernels = load_kernels("drift")
pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")

SIZES = [(1, 1), (1, 128), (5, 33), (127, 64), (129, 96), (3, 4096)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def entries(num_rows: int, num_entries: int) -> Tensor:
    """Of each row, in no order; none of them 0, and twice as many that belong to nobody."""
    order = torch.randperm(num_entries - 1, generator=torch.Generator().manual_seed(1))[:num_rows] + 1
    return order.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_the_drift_is_the_reference_and_the_plane_too(rows: int, size: int, dtype: torch.dtype) -> None:
    """What nobody asks about holds NaN; rows in fp32 meet a plane of another type, too."""
    at_M = entries(rows, 3 * rows + 1)
    kept_ER = torch.full((3 * rows + 1, size), torch.nan, dtype=dtype, device=DEVICE)
    kept_ER[at_M] = randn(rows, size, dtype=dtype)
    for wide in {dtype, torch.float32}:
        new_MR = kept_ER[at_M].to(wide) + 0.1 * randn(rows, size, dtype=wide, seed=2)
        for keep_M in (None, torch.arange(rows, device=DEVICE) % 3 != 1):
            ours_ER, exact_ER = kept_ER.clone(), kept_ER.clone()
            ours = kernels.drift(new_MR, ours_ER, at_M, keep_M)
            exact = reference.drift(new_MR, exact_ER, at_M, keep_M)
            assert ours.dtype == exact.dtype == torch.float32
            torch.testing.assert_close(ours, exact, rtol=2e-5, atol=1e-12)
            torch.testing.assert_close(ours_ER[1:], exact_ER[1:], rtol=0, atol=0, equal_nan=True)


def test_rows_of_a_wider_tensor() -> None:
    """Value vectors are the end of a row of queries, keys and values."""
    wide_MR, kept_ER, at_M = randn(5, 96), randn(9, 32, seed=1), entries(5, 9)
    ours = kernels.drift(wide_MR[:, 64:], kept_ER, at_M)
    torch.testing.assert_close(ours, reference.drift(wide_MR[:, 64:], kept_ER, at_M), rtol=2e-5, atol=0)


def test_zeros_large_and_opposite_ones() -> None:
    new_MR = torch.tensor([[0.0, 0], [0, 0], [3, 4], [1e30, -1e30], [2, 1], [1e-30, 0]], device=DEVICE)
    old_MR = torch.tensor([[0.0, 0], [1, 0], [0, 0], [-1e30, 1e30], [4, 2], [0, 1e-30]], device=DEVICE)
    kept_ER = torch.cat((torch.full_like(old_MR[:1], torch.nan), old_MR))
    drift_M = kernels.drift(new_MR, kept_ER, torch.arange(1, 7, device=DEVICE))
    torch.testing.assert_close(drift_M.cpu(), torch.tensor([0.0, 1, 1, 2, 0, 1]), rtol=1e-6, atol=1e-12)


def test_small_drift_keeps_its_digits() -> None:
    """1 - cosine in fp32 would have none: the negative control."""
    new_MR, old_MR = torch.tensor([[1.0, 1e-5]], device=DEVICE), torch.tensor([[1.0, 0.0]], device=DEVICE)
    drift_M = kernels.drift(new_MR, torch.cat((old_MR, old_MR)), torch.ones(1, dtype=torch.int64, device=DEVICE))
    assert float(drift_M) == pytest.approx(5e-11, rel=1e-3)
    assert float(1 - torch.nn.functional.cosine_similarity(new_MR, old_MR)) != pytest.approx(5e-11, rel=0.5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: inf / inf, the largest of NaN
@pytest.mark.parametrize("size", [2, 33])
def test_what_is_no_number_has_drifted_by_none(size: int) -> None:
    """Wherever it stands, and whatever it meets, a zero vector too; infinities have no direction."""
    nan, inf = torch.nan, torch.inf
    new_MR, old_MR = torch.zeros(8, size), torch.ones(8, size)
    new_MR[:, 0] = torch.tensor([nan, nan, inf, 1, 1, nan, 3, 0])
    new_MR[0] = nan
    old_MR[3:5, 1] = torch.tensor([nan, -inf])
    old_MR[5] = 0
    kept_ER, at_M = torch.cat((old_MR[:1], old_MR)).to(DEVICE), torch.arange(1, 9, device=DEVICE)
    ours = kernels.drift(new_MR.to(DEVICE), kept_ER, at_M)
    exact = reference.drift(new_MR.to(DEVICE), kept_ER, at_M)
    assert exact.isnan().tolist() == [True] * 6 + [False] * 2
    torch.testing.assert_close(ours, exact, rtol=2e-5, atol=1e-12, equal_nan=True)


def seats(sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Seat of each row, and where each seat's rows begin."""
    sizes_S = torch.tensor(sizes, device=DEVICE)
    seat_M = torch.arange(len(sizes), device=DEVICE).repeat_interleave(sizes_S)
    return seat_M, torch.nn.functional.pad(sizes_S.cumsum(0), (1, 0))


@pytest.mark.parametrize("sizes", [[1], [127], [129], [0, 5, 0, 40, 1, 200, 0], [32] * 6, [300, 7]], ids=str)
@pytest.mark.parametrize("levels", [0, 3])
def test_the_furthest_are_the_reference(sizes: list[int], levels: int) -> None:
    """Few levels make many ties; counts of none, of some and of more than there are; an empty seat."""
    seat_M, first_S = seats(sizes)
    generator = torch.Generator().manual_seed(len(sizes))
    drift_M = torch.rand(len(seat_M), generator=generator).to(DEVICE)
    if levels:
        drift_M = (drift_M * levels).floor()
    optional_M = (torch.rand(len(seat_M), generator=generator) < 0.7).to(DEVICE)
    drift_M = torch.where(optional_M, drift_M, torch.nan)  # nobody may ask how far the others are
    drift_M[::7] = torch.where(optional_M[::7], torch.inf, torch.nan)
    for share in (0.0, 0.25, 1.5):
        count_S = (torch.tensor(sizes, device=DEVICE) * share).long()
        ours = kernels.furthest(drift_M, optional_M, seat_M, first_S, count_S)
        assert torch.equal(ours, reference.furthest(drift_M, optional_M, seat_M, first_S, count_S))
        counted = torch.zeros_like(count_S).index_add_(0, seat_M, ours.long())
        there = torch.zeros_like(count_S).index_add_(0, seat_M, optional_M.long())
        assert torch.equal(counted, torch.minimum(count_S, there))


def test_no_number_is_the_furthest_and_is_counted() -> None:
    """As far as infinity, so that the leftmost of both come first; and nobody is chosen beyond the count."""
    seat_M, first_S = seats([6, 3])
    drift_M = torch.tensor([2.0, torch.nan, torch.inf, 1, torch.nan, 0, 0, torch.nan, 2], device=DEVICE)
    optional_M = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1], device=DEVICE).bool()
    for counts, wanted in (([1, 1], [2, 7]), ([2, 2], [2, 4, 7, 8]), ([3, 0], [0, 2, 4])):
        count_S = torch.tensor(counts, device=DEVICE)
        for way in (kernels, reference):
            chosen = way.furthest(drift_M, optional_M, seat_M, first_S, count_S)
            assert chosen.nonzero()[:, 0].tolist() == wanted, way


def test_rows_that_must_come_on_top() -> None:
    seat_M, first_S = seats([5, 40])
    drift_M, count_S = randn(45).abs(), torch.tensor([2, 7], device=DEVICE)
    must_M = torch.arange(45, device=DEVICE) % 4 == 1
    given = (drift_M, ~must_M, seat_M, first_S, count_S)
    for way in (kernels, reference):
        assert torch.equal(way.furthest(*given, must_M), way.furthest(*given) | must_M)
    assert torch.equal(kernels.furthest(*given, must_M), reference.furthest(*given, must_M))


@pytest.mark.parametrize(("per_seat", "most"), [(1, 1), (16, 4), (48, 48), (48, 1), (1100, 275)])
def test_the_packed_rows_are_the_reference(per_seat: int, most: int) -> None:
    """Seats with no row, with as many as there is room for, more and fewer; seats of several steps."""
    num_seats = 4
    share = torch.tensor([0, most / per_seat, 1, 0.5 * most / per_seat])[:, None]
    chosen_M = (torch.rand(num_seats, per_seat, generator=torch.Generator().manual_seed(per_seat)) < share).flatten()
    chosen_M = chosen_M.to(DEVICE)
    write_M = torch.arange(len(chosen_M), device=DEVICE) + 7
    see_M = torch.arange(1, len(chosen_M) + 1, dtype=torch.int32, device=DEVICE)
    ours = kernels.picked(chosen_M, per_seat, most, write_M, see_M)
    exact = reference.picked(chosen_M, per_seat, most, write_M, see_M)
    for name, one, other in zip(exact._fields, ours, exact):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=name)
    valid_P = exact.write_P > 0
    wanted_M = chosen_M & (chosen_M.view(num_seats, -1).cumsum(1).flatten() <= most)
    assert exact.rows_P[valid_P].tolist() == wanted_M.nonzero()[:, 0].tolist()
    assert exact.seat_P.tolist() == (exact.rows_P // per_seat).tolist()
    assert not exact.see_P[~valid_P].any()
    assert exact.num_S.tolist() == wanted_M.view(num_seats, -1).sum(1).tolist()


def test_of_equals_the_leftmost() -> None:
    seat_M, first_S = seats([4, 3])
    drift_M, optional_M = torch.ones(7, device=DEVICE), torch.tensor([0, 1, 1, 1, 1, 1, 1], device=DEVICE).bool()
    count_S = torch.tensor([2, 1], device=DEVICE)
    chosen = kernels.furthest(drift_M, optional_M, seat_M, first_S, count_S)
    assert chosen.tolist() == [False, True, True, False, True, False, False]


def test_no_rows() -> None:
    none_M = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert len(kernels.drift(randn(0, 8), randn(3, 8), none_M)) == 0
    first_S = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    assert len(kernels.furthest(randn(0), none_M.bool(), none_M, first_S, first_S[:2])) == 0


def test_what_the_kernels_take() -> None:
    assert kernels.supported(randn(2, 8), randn(3, 8))
    assert not kernels.supported(randn(2, 8).double(), randn(3, 8))
    assert not kernels.supported(randn(8, 2).T, randn(3, 8))
    assert not kernels.supported(randn(2, 8), randn(3, 9))


CALLS = """
from unmask.ops.triton import drift as kernels
rows, flags = torch.ones(9, dtype=torch.int64), torch.ones(9, dtype=torch.bool)
for size, new, kept, keep in (
    (128, torch.float32, torch.float32, flags),
    (4096, torch.bfloat16, torch.bfloat16, None),
    (320, torch.float32, torch.bfloat16, flags),
):
    kernels.drift(torch.zeros(9, size, dtype=new), torch.zeros(40, size, dtype=kept), rows, keep)
for must in (None, flags):
    seats = rows, torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    kernels.furthest(torch.zeros(9), flags, *seats, must)
for per_seat, most in ((9, 1), (1, 1), (3, 2)):
    kernels.picked(flags, per_seat, most, rows, rows.int())
"""


def test_they_compile_for_an_h200() -> None:
    """A row in loads of 16 bytes."""
    found = compile_for_h200(CALLS)
    assert [name for name, *_ in found] == ["_drift_kernel"] * 3 + ["_furthest_kernel"] * 2 + ["_picked_kernel"] * 3
    assert all("ld.global.v4.b32" in ptx for _, _, ptx in found[:2])
    assert all(shared < 48 << 10 for _, shared, _ in found)
