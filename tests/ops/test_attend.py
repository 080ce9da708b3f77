"""`ops.attend` and `ops.tracking_mass` against a loop over rows and heads, in fp64: what a row sees, and nothing else,
decides its output.

M rows, S seats, P pages of a seat, N positions, E entries of the pool, J live entries, H query heads, Hkv key heads,
hd head size
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unmask import ops

HEADS = [(4, 4), (4, 2), (6, 1)]
MIXED = (5, 0, 129, 1, 127)  # rows of each seat: groups of one seat, of two unequal ones, and none
HD, SCRATCH = 8, 7


@dataclass(frozen=True)
class Case:
    """The arguments of one call, and whose attention counts as mass."""

    q_M: Tensor
    k_E: Tensor
    v_E: Tensor
    sight: ops.Sight
    counts_M: Tensor

    def attend(self) -> Tensor:
        return ops.attend(self.q_M, self.k_E, self.v_E, self.sight)

    def mass(self, *, softmax: bool) -> Tensor:
        return ops.tracking_mass(self.q_M, self.k_E, self.sight, self.counts_M, softmax=softmax)

    def looking(self, **changes: Any) -> Case:
        """The same call with another sight."""
        return replace(self, sight=replace(self.sight, **changes))

    @property
    def num_positions(self) -> int:
        return self.sight.page_table_SP.shape[1] * self.sight.page_size

    def swept(self, row: int) -> list[int]:
        """Positions that the definition lets a row sweep."""
        seat, shadow_SN = int(self.sight.seat_M[row]), self.sight.shadow_SN
        return [n for n in range(int(self.sight.see_M[row])) if shadow_SN is None or not shadow_SN[seat, n]]

    def entry(self, seat: int, pos: int) -> int:
        page, offset = divmod(pos, self.sight.page_size)
        return int(self.sight.page_table_SP[seat, page]) * self.sight.page_size + offset

    def seen(self, row: int) -> list[int]:
        """Entries of the swept positions, then of the live list; one that is seen twice is listed twice."""
        seat, live_SJ, bits_MJ = int(self.sight.seat_M[row]), self.sight.live_SJ, self.sight.live_bits_MJ
        out = [self.entry(seat, pos) for pos in self.swept(row)]
        if live_SJ is not None and bits_MJ is not None:
            out += [entry for entry, bit in zip(live_SJ[seat].tolist(), bits_MJ[row].tolist()) if bit]
        return out

    def logits(self, row: int, head: int, entries: list[int]) -> Tensor:
        """q . k, unscaled."""
        group = self.q_M.shape[1] // self.k_E.shape[1]
        return self.k_E[entries, head // group] @ self.q_M[row, head]

    def attend_by_loop(self) -> Tensor:
        """One row and one head at a time."""
        out_M = torch.zeros_like(self.q_M)
        num_rows, num_heads, head_dim = self.q_M.shape
        group = num_heads // self.k_E.shape[1]
        for row in range(num_rows):
            if entries := self.seen(row):
                for head in range(num_heads):
                    weight = (self.logits(row, head, entries) / math.sqrt(head_dim)).softmax(0)
                    out_M[row, head] = weight @ self.v_E[entries, head // group]
        return out_M

    def mass_by_loop(self, *, softmax: bool) -> Tensor:
        """One counted row and one head at a time. The raw mass of a position that some counted row of the seat sweeps
        is that of all its counted rows."""
        num_rows, num_heads, head_dim = self.q_M.shape
        mass_SN = torch.zeros(len(self.sight.page_table_SP), self.num_positions, dtype=torch.float64)
        counted = [row for row in range(num_rows) if self.counts_M[row]]
        by_seat: dict[int, set[int]] = {}
        for row in counted:
            by_seat.setdefault(int(self.sight.seat_M[row]), set()).update(self.swept(row))
        for row in counted:
            seat = int(self.sight.seat_M[row])
            pos = self.swept(row) if softmax else sorted(by_seat[seat])
            for head in range(num_heads):
                if softmax and pos:  # the live entries are in the denominator; what they get counts nowhere
                    value = (self.logits(row, head, self.seen(row)) / math.sqrt(head_dim)).softmax(0)[: len(pos)]
                else:
                    value = self.logits(row, head, [self.entry(seat, n) for n in pos])
                mass_SN[seat, pos] += value / num_heads
        return mass_SN


def make(
    num_rows: tuple[int, ...] = MIXED,
    heads: tuple[int, int] = (4, 2),
    num_live: int | None = 5,
    seed: int = 0,
    *,
    page_size: int = 4,
    num_pages: int = 5,
    per_seat: int | None = None,
) -> Case:
    """Random arguments: shuffled pages, of which short seats lack the last; reach from nothing to everything; live
    entries from the canvas and from scratch; None: neither a live list nor a shadow. With `per_seat` the rows of each
    seat are padded."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def randint(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    num_seats, counts_S = len(num_rows), torch.tensor(num_rows)
    own_S = randint(1, num_pages + 1, num_seats)
    own_S[int(counts_S.argmax())] = num_pages
    shuffled = 1 + torch.randperm(num_seats * num_pages, generator=generator)
    has_page_SP = torch.arange(num_pages) < own_S[:, None]
    page_table_SP = torch.where(has_page_SP, shuffled.view(num_seats, num_pages), 0).int()
    num_canvas = (1 + num_seats * num_pages) * page_size
    num_entries = num_canvas + num_seats * SCRATCH
    seat_M = torch.arange(num_seats).repeat_interleave(counts_S)
    reach_M = own_S[seat_M] * page_size
    see_M = (chance(len(seat_M)) * (reach_M + 1)).int()
    see_M[1::7], see_M[2::7] = 0, reach_M[2::7].int()
    live: dict[str, Any] = {}
    if num_live is not None:
        from_canvas_SJ = (page_table_SP[:, :1] * page_size).long() + randint(0, page_size, num_seats, num_live)
        from_scratch_SJ = num_canvas + torch.arange(num_seats)[:, None] * SCRATCH
        from_scratch_SJ = from_scratch_SJ + randint(0, SCRATCH, num_seats, num_live)
        live = {
            "live_SJ": torch.where(chance(num_seats, num_live) < 0.5, from_canvas_SJ, from_scratch_SJ),
            "live_bits_MJ": chance(len(seat_M), num_live) < 0.5,
            "shadow_SN": chance(num_seats, num_pages * page_size) < 0.3,
        }
    sight = ops.Sight(
        seat_M=seat_M,
        see_M=see_M,
        num_rows_S=counts_S,
        page_table_SP=page_table_SP,
        page_size=page_size,
        num_keys=int(see_M.max()) if len(see_M) else 0,
        **live,
    )
    q_M = randn(len(seat_M), heads[0], HD)
    k_E, v_E = randn(num_entries, heads[1], HD), randn(num_entries, heads[1], HD)
    case = Case(q_M, k_E, v_E, sight, chance(len(seat_M)) < 0.4)
    return case if per_seat is None else fixed(case, per_seat)


def real_rows(case: Case, per_seat: int) -> Tensor:
    """Rows of the fixed shape that are no padding, in order."""
    return (torch.arange(per_seat) < case.sight.num_rows_S[:, None]).flatten()


def fixed(case: Case, per_seat: int) -> Case:
    """The same rows in fixed shape; padding rows have any query."""
    real = real_rows(case, per_seat)
    num_seats = len(case.sight.page_table_SP)

    def padded(value_M: Tensor, filler: float = 0) -> Tensor:
        out = torch.full((len(real), *value_M.shape[1:]), filler, dtype=value_M.dtype)
        out[real] = value_M
        return out

    bits_MJ = case.sight.live_bits_MJ
    sight = replace(
        case.sight,
        seat_M=torch.arange(num_seats).repeat_interleave(per_seat),
        see_M=padded(case.sight.see_M),
        num_keys=case.num_positions,
        per_seat=per_seat,
        live_bits_MJ=None if bits_MJ is None else padded(bits_MJ),
    )
    return replace(case, q_M=padded(case.q_M, 3), sight=sight, counts_M=padded(case.counts_M))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ragged layouts of any kind."""
    return make(
        tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))),
        draw(st.sampled_from(HEADS)),
        draw(st.sampled_from([None, 0, 1, 3, 9])),
        draw(st.integers(0, 10_000)),
        page_size=draw(st.sampled_from([1, 2, 5])),
        num_pages=draw(st.integers(1, 4)),
    )


def close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-12)


# attend


@pytest.mark.parametrize("per_seat", [None, 131])
@pytest.mark.parametrize("num_live", [None, 0, 1, 5, 64])
@pytest.mark.parametrize("heads", HEADS)
def test_attend_is_the_loop(heads: tuple[int, int], num_live: int | None, per_seat: int | None) -> None:
    """Seats with no, one and many rows, ragged and in fixed shape."""
    case = make(MIXED, heads, num_live, seed=1, per_seat=per_seat)
    close(case.attend(), case.attend_by_loop())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 3))
def test_any_layout_is_the_loop_ragged_and_fixed(case: Case, spare: int) -> None:
    """Both forms give each row the same; padding rows are zero."""
    exact = case.attend_by_loop()
    close(case.attend(), exact)
    per_seat = max(1, int(case.sight.num_rows_S.max()) + spare)
    out_M, real = fixed(case, per_seat).attend(), real_rows(case, per_seat)
    close(out_M[real], exact)
    assert not out_M[~real].any()


def other_page(case: Case) -> Tensor:
    return case.sight.page_table_SP.roll(1, 0)


CHANGES: dict[str, Callable[[Case], Case]] = {
    "q": lambda case: replace(case, q_M=case.q_M.flip(1)),
    "k": lambda case: replace(case, k_E=case.k_E.flip(0)),
    "v": lambda case: replace(case, v_E=case.v_E.flip(0)),
    "seat": lambda case: case.looking(seat_M=(case.sight.seat_M + 1) % 5, num_rows_S=case.sight.num_rows_S.roll(1)),
    "see": lambda case: case.looking(see_M=(case.sight.see_M - 1).clamp(min=0)),
    "num_rows": lambda case: case.looking(num_rows_S=torch.tensor([5, 0, 128, 2, 127])),
    "page_table": lambda case: case.looking(page_table_SP=other_page(case)),
    "page_size": lambda case: case.looking(page_size=2, num_keys=10, see_M=case.sight.see_M.clamp(max=10)),
    "live": lambda case: case.looking(live_SJ=case.sight.live_SJ.roll(1, 0)),  # type: ignore[union-attr]
    "no live": lambda case: case.looking(live_SJ=None, live_bits_MJ=None),
    "bits": lambda case: case.looking(live_bits_MJ=~case.sight.live_bits_MJ),  # type: ignore[operator]
    "shadow": lambda case: case.looking(shadow_SN=case.sight.shadow_SN.roll(1, 1)),  # type: ignore[union-attr]
    "no shadow": lambda case: case.looking(shadow_SN=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_loop_notices_every_argument(change: str) -> None:
    """Negative control: a call that differs in one argument is not the loop's result."""
    case = make()
    with pytest.raises(AssertionError):
        close(CHANGES[change](case).attend(), case.attend_by_loop())


@pytest.mark.parametrize("change", ["per_seat", "num_keys"])
def test_the_loop_notices_a_wrong_fixed_shape(change: str) -> None:
    """Negative control: the extent cuts what rows see, and rows that are counted off wrongly go to other seats."""
    case = make((6, 6, 6), per_seat=6)
    seat_S = torch.arange(2)
    wrong = {
        "per_seat": case.looking(per_seat=9, page_table_SP=case.sight.page_table_SP[seat_S]),
        "num_keys": case.looking(num_keys=case.num_positions - 1),
    }[change]
    with pytest.raises(AssertionError):
        close(wrong.attend(), case.attend_by_loop())


@pytest.mark.parametrize("per_seat", [None, 12])
@pytest.mark.parametrize("num_live", [None, 3])
def test_rows_that_see_nothing_are_zero(num_live: int | None, per_seat: int | None) -> None:
    """No reach and no bits, or a reach that is all shadow, gives exact zeros; a row next to it keeps its value. In one
    seat no row sees anything."""
    case = make((6, 3, 11), num_live=num_live)
    see_M = case.sight.see_M.clone()
    see_M[6:9] = 0
    see_M[[1, 4, 10]] = 0
    see_M[0] = 2
    changes: dict[str, Tensor] = {}
    if num_live is not None:
        bits_MJ, shadow_SN = case.sight.live_bits_MJ.clone(), torch.zeros_like(case.sight.shadow_SN)  # type: ignore
        bits_MJ[[0, 1, 4, *range(6, 9), 10]] = False
        shadow_SN[0, :2] = True  # row 0 reaches two positions, and both are shadowed
        changes = {"live_bits_MJ": bits_MJ, "shadow_SN": shadow_SN}
    case = case.looking(see_M=see_M, **changes)
    blind = [row for row in range(20) if not case.seen(row)]
    assert {1, 4, 6, 7, 8, 10} <= set(blind)
    assert (0 in blind) == (num_live is not None)
    exact = case.attend_by_loop()
    out_M = case.attend() if per_seat is None else fixed(case, per_seat).attend()[real_rows(case, per_seat)]
    assert not out_M[blind].any()
    assert out_M[[row for row in range(20) if row not in blind]].any(2).all()
    close(out_M, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_pass_that_sees_nothing_is_zero(dtype: torch.dtype) -> None:
    """No keys at all: neither NaN nor what the memory held before."""
    case = make((2, 5), num_live=None)
    case = case.looking(see_M=torch.zeros_like(case.sight.see_M), num_keys=0)
    out_M = ops.attend(case.q_M.to(dtype), case.k_E.to(dtype), case.v_E.to(dtype), case.sight)
    assert out_M.dtype == dtype
    assert torch.equal(out_M, torch.zeros_like(out_M))
    for softmax in (False, True):
        assert not case.mass(softmax=softmax).any()


def test_a_pass_without_rows() -> None:
    case = make((0, 0))
    assert case.attend().shape == (0, 4, HD)
    assert not case.mass(softmax=True).any()


@pytest.mark.parametrize("per_seat", [None, 9])
def test_what_no_row_sees_may_hold_any_finite_number(per_seat: int | None) -> None:
    """Entries outside a row's view do not change one bit of it, however large they are; nor does the trash page."""
    case = make((6, 0, 1, 8), num_live=4, per_seat=per_seat)
    before_M = case.attend()
    for row in range(len(before_M)):
        hidden = sorted(set(range(len(case.k_E))) - set(case.seen(row)))
        k_E, v_E = case.k_E.clone(), case.v_E.clone()
        k_E[hidden], v_E[hidden] = 1e4, -1e4
        assert torch.equal(replace(case, k_E=k_E, v_E=v_E).attend()[row], before_M[row])


def test_what_a_row_sees_changes_it() -> None:
    """Negative control: every single entry of a view matters."""
    case = make((6, 0, 1, 8), num_live=4)
    before_M = case.attend()
    for row in (0, 2, 6, 9):
        for entry in case.seen(row):
            v_E = case.v_E.clone()
            v_E[entry] += 1
            assert not torch.equal(replace(case, v_E=v_E).attend()[row], before_M[row])


def one_hot(case: Case, label_E: list[int]) -> Case:
    """Equal weights, and values that tell the label of their entry: a row's output is its share of each label."""
    v_E = torch.eye(max(label_E) + 1, dtype=torch.float64)[label_E][:, None].expand(-1, case.v_E.shape[1], -1)
    q_M = torch.zeros(*case.q_M.shape[:2], v_E.shape[2], dtype=torch.float64)
    return replace(case, q_M=q_M, k_E=torch.zeros_like(v_E), v_E=v_E.contiguous())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_each_row_sees_each_entry_as_often_as_the_definition_says(case: Case, in_fixed_shape: bool) -> None:
    if in_fixed_shape:
        case = fixed(case, max(1, int(case.sight.num_rows_S.max())))
    share_ME = one_hot(case, list(range(len(case.k_E)))).attend()
    for row in range(len(share_ME)):
        seen = Counter(case.seen(row))
        expected_E = torch.tensor([seen[entry] for entry in range(len(case.k_E))], dtype=torch.float64)
        close(share_ME[row], (expected_E / max(1, seen.total())).expand_as(share_ME[row]))


def in_two_contents(seed: int, *, shadowed: bool = True) -> tuple[Case, list[int]]:
    """Some positions of each seat are live in two contents, from the canvas and from scratch, and each row holds the
    bit of one of them. Also the position of every entry."""
    generator = torch.Generator().manual_seed(seed)
    case = make((7, 0, 1, 19), num_live=None, seed=seed, num_pages=3)
    num_seats, capacity, pool_end = 4, case.num_positions, len(case.k_E) - 4 * SCRATCH
    pos_SJ = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(num_seats)])
    entry_SN = torch.tensor([[case.entry(seat, n) for n in range(capacity)] for seat in range(num_seats)])
    scratch_SJ = pool_end + torch.arange(num_seats)[:, None] * SCRATCH + torch.arange(3)
    first_MJ = torch.rand(len(case.q_M), 3, generator=generator) < 0.5
    case = case.looking(
        see_M=case.sight.see_M.clamp(min=4),
        live_SJ=torch.cat((entry_SN.gather(1, pos_SJ), scratch_SJ), 1),
        live_bits_MJ=torch.cat((first_MJ, ~first_MJ), 1),
        shadow_SN=torch.zeros(num_seats, capacity, dtype=torch.bool).scatter_(1, pos_SJ, shadowed),
    )
    pos_E = torch.zeros(len(case.k_E), dtype=torch.long)
    pos_E[entry_SN.flatten()] = torch.arange(capacity).repeat(num_seats)
    pos_E[scratch_SJ.flatten()] = pos_SJ.flatten()
    return case, pos_E.tolist()


def positions_seen(case: Case, pos_E: list[int]) -> bool:
    """Does each row see each position of its reach once?"""
    share_MN = one_hot(case, pos_E).attend()[:, 0]
    reach_M1 = case.sight.see_M[:, None]
    expected_MN = (torch.arange(share_MN.shape[1]) < reach_M1) / reach_M1.clamp(min=1).double()
    return torch.allclose(share_MN, expected_MN, atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_each_row_sees_each_visible_position_once(seed: int) -> None:
    """Whatever content of a live position it sees. Without the shadow it would see those positions twice."""
    case, pos_E = in_two_contents(seed)
    assert positions_seen(case, pos_E)
    assert positions_seen(fixed(case, 20), pos_E)
    assert not positions_seen(*in_two_contents(seed, shadowed=False))


def test_a_repeated_entry_counts_twice() -> None:
    """Why a position that is live must be shadowed: an entry seen in the sweep and in the list weighs double."""
    case = make((4, 4), (4, 4), num_live=None, num_pages=2)
    num_rows, capacity = len(case.q_M), case.num_positions
    pages_SP = torch.tensor([[3, 1], [4, 2]], dtype=torch.int32)
    live_SJ = torch.tensor([[3 * 4 + 2], [4 * 4 + 2]])
    swept = case.looking(page_table_SP=pages_SP, see_M=torch.full((num_rows,), capacity, dtype=torch.int32), num_keys=8)
    twice = swept.looking(live_SJ=live_SJ, live_bits_MJ=torch.ones(num_rows, 1, dtype=torch.bool))
    shadow_SN = torch.zeros(2, capacity, dtype=torch.bool)
    shadow_SN[:, 2] = True
    close(twice.attend(), twice.attend_by_loop())
    close(twice.looking(shadow_SN=shadow_SN).attend(), swept.attend())
    with pytest.raises(AssertionError):
        close(twice.attend(), swept.attend())
    thrice = swept.looking(live_SJ=live_SJ.repeat(1, 2), live_bits_MJ=torch.ones(num_rows, 2, dtype=torch.bool))
    share_ME = one_hot(thrice, list(range(len(case.k_E)))).attend()
    close(share_ME[0, 0, live_SJ[0, 0]], torch.tensor(3 / (capacity + 2), dtype=torch.float64))


# Mass


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("per_seat", [None, 130])
@pytest.mark.parametrize("num_live", [None, 5])
@pytest.mark.parametrize("heads", HEADS)
def test_mass_is_the_loop(heads: tuple[int, int], num_live: int | None, per_seat: int | None, softmax: bool) -> None:
    """The mean over heads, summed over the counted rows."""
    case = make(MIXED, heads, num_live, seed=2, per_seat=per_seat)
    assert case.mass(softmax=softmax).dtype == torch.float64
    close(case.mass(softmax=softmax), case.mass_by_loop(softmax=softmax))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(cases(), st.booleans(), st.integers(0, 3))
def test_mass_of_any_layout_is_the_loop_ragged_and_fixed(case: Case, softmax: bool, spare: int) -> None:
    exact = case.mass_by_loop(softmax=softmax)
    close(case.mass(softmax=softmax), exact)
    close(fixed(case, max(1, int(case.sight.num_rows_S.max()) + spare)).mass(softmax=softmax), exact)


@pytest.mark.parametrize("change", ["q", "k", "seat", "see", "num_rows", "page_table", "shadow", "counts"])
@pytest.mark.parametrize("softmax", [False, True])
def test_the_loop_notices_every_argument_of_the_mass(change: str, softmax: bool) -> None:
    """Negative control. (One row that reaches a position is enough for raw mass: there, all reaches change.)"""
    case = make()
    if change == "counts":
        wrong = replace(case, counts_M=case.counts_M.roll(1))
    elif change == "see":
        wrong = case.looking(see_M=(case.sight.see_M - 3).clamp(min=0))
    else:
        wrong = CHANGES[change](case)
    with pytest.raises(AssertionError):
        close(wrong.mass(softmax=softmax), case.mass_by_loop(softmax=softmax))


@pytest.mark.parametrize("change", ["live", "bits", "no live"])
def test_live_entries_are_in_the_denominator_only(change: str) -> None:
    """They change the attention weights, and not the raw mass."""
    case = make()
    other = CHANGES[change](case)
    close(other.mass(softmax=False), case.mass(softmax=False))
    with pytest.raises(AssertionError):
        close(other.mass(softmax=True), case.mass(softmax=True))


@pytest.mark.parametrize("softmax", [False, True])
def test_positions_that_no_counted_row_sweeps_get_nothing(softmax: bool) -> None:
    """Beyond the counted rows' reach, shadowed, or in a seat where nobody counts; rows that do not count change
    nothing."""
    case = make((6, 3, 5))
    counts_M = torch.zeros(14, dtype=torch.bool)
    counts_M[[0, 2]] = True
    see_M = case.sight.see_M.clone()
    see_M[[0, 2]] = torch.tensor([3, 7], dtype=torch.int32)
    case = replace(case.looking(see_M=see_M), counts_M=counts_M)
    assert case.sight.shadow_SN is not None
    expected_SN = torch.zeros_like(case.sight.shadow_SN)
    expected_SN[0, :7] = ~case.sight.shadow_SN[0, :7]
    mass_SN = case.mass(softmax=softmax)
    assert torch.equal(mass_SN != 0, expected_SN)
    q_M = case.q_M.clone()
    q_M[~counts_M] = 1e3
    assert torch.equal(replace(case, q_M=q_M).mass(softmax=softmax), mass_SN)
    assert not replace(case, counts_M=torch.zeros_like(counts_M)).mass(softmax=softmax).any()


def test_weights_of_one_row_sum_to_one_without_a_live_list() -> None:
    case = make((9, 4), num_live=None)
    seeing_M = case.sight.see_M > 0
    mass_SN = replace(case, counts_M=torch.ones_like(seeing_M)).mass(softmax=True)
    close(mass_SN.sum(1), torch.stack([seeing_M[:9].sum(), seeing_M[9:].sum()]).double())
    assert not torch.allclose(make((9, 4)).mass(softmax=True).sum(1), mass_SN.sum(1))


def test_mass_of_narrow_types_is_summed_in_fp32() -> None:
    case = make()
    narrow = replace(case, q_M=case.q_M.bfloat16(), k_E=case.k_E.bfloat16())
    exact = replace(case, q_M=narrow.q_M.double(), k_E=narrow.k_E.double())
    for softmax in (False, True):
        mass_SN = narrow.mass(softmax=softmax)
        assert mass_SN.dtype == torch.float32
        torch.testing.assert_close(mass_SN.double(), exact.mass(softmax=softmax), atol=1e-4, rtol=1e-4)
    rough_SN = torch.zeros_like(mass_SN, dtype=torch.bfloat16) + exact.mass(softmax=True).bfloat16()
    assert not torch.allclose(rough_SN.double(), exact.mass(softmax=True), atol=1e-4, rtol=1e-4)


# Sizes


def tensors_in(tree: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, Tensor)]


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation makes; views, and what is changed in place, are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tensors_in((args, kwargs))}
        for made in tensors_in(out):
            if made.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, made.numel())
        return out


def largest(run: Callable[[], object]) -> int:
    recorded = Largest()
    with recorded:
        run()
    return recorded.numel


def many_rows(num_rows: int, per_seat: int | None, num_live: int | None) -> Case:
    """Two seats with so many rows each over 40 keys, all of them counted."""
    case = make((num_rows, num_rows), num_live=num_live, num_pages=10)
    case = replace(case, counts_M=torch.ones_like(case.counts_M))
    return case if per_seat is None else fixed(case, per_seat)


def by_matrix(case: Case) -> Tensor:
    """Softmax mass as one would write it at first."""
    group = case.sight.groups[0]
    q_gR, k_gK = case.q_M[group.row_gR], case.k_E[group.entry_gK].repeat_interleave(2, 2)
    logits = torch.einsum("grhd,gkhd->grkh", q_gR, k_gK) / math.sqrt(HD)
    if group.allowed_gRK is not None:
        logits = logits.masked_fill(~group.allowed_gRK[..., None], -math.inf)
    return logits.softmax(2).nan_to_num(0).sum(1).mean(-1)[:, : group.num_swept]


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("per_seat", [None, 600])
@pytest.mark.parametrize("num_live", [None, 3])
def test_mass_never_has_queries_by_keys(per_seat: int | None, softmax: bool, num_live: int | None) -> None:
    """Not even for one head: the largest tensor has the size of the queries or of the keys. The obvious way has it."""
    case = many_rows(600, per_seat, num_live)
    num_queries, num_keys, num_heads = len(case.q_M), 40 + (num_live or 0), 4
    assert case.sight.groups  # the masks are made once a pass, and attention needs them too
    made = largest(lambda: case.mass(softmax=softmax))
    assert made <= max(case.q_M.numel(), 2 * num_keys * num_heads * HD) < num_queries * num_keys
    naive_gK = by_matrix(case)
    close(naive_gK, case.mass(softmax=True)[:, : naive_gK.shape[1]])
    assert largest(lambda: by_matrix(case)) >= num_queries * num_keys * num_heads


@pytest.mark.parametrize("num_live", [None, 3])
def test_a_fixed_shape_reads_nothing_from_the_device(num_live: int | None) -> None:
    """Tensors without values are enough for it. Ragged rows must look: their groups depend on the counts."""
    ragged, case = make((6, 3, 0), num_live=num_live), make((6, 3, 0), num_live=num_live, per_seat=7)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for run in (Case.attend, lambda each: each.mass(softmax=False), lambda each: each.mass(softmax=True)):
            assert len(run(case)) == (21 if run is Case.attend else 3)
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                run(ragged)


def test_rows_of_one_view_share_their_mask() -> None:
    """The rows of most passes see what their seat sees: no mask of queries by keys is made for them."""
    case = many_rows(60, None, None)
    two_reaches = (30 + case.sight.seat_M).int()
    shared, mixed = case.looking(see_M=two_reaches), case.looking(see_M=two_reaches - (case.sight.seat_M == 0).int())
    mixed.sight.see_M[5] = 30
    assert largest(lambda: shared.sight.groups) < len(case.q_M) * 30 <= largest(lambda: mixed.sight.groups)
    for each in (shared, mixed):
        close(each.attend(), each.attend_by_loop())
        for softmax in (False, True):
            close(each.mass(softmax=softmax), each.mass_by_loop(softmax=softmax))
