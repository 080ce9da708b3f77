"""Row plans: which rows run, in which order, and what each of them carries; packing without a look at the values.

S seats, N positions, X scratch columns, E = N + X + 1 columns, M rows, J live columns, W slots
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan, Scratch, pack, slots, spread

MASK = 9


@st.composite
def wanted(draw: st.DrawFn) -> Tensor:
    """bool [S, N]"""
    num_seats, capacity = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    row = st.lists(st.booleans(), min_size=capacity, max_size=capacity)
    return torch.tensor(draw(st.lists(row, min_size=num_seats, max_size=num_seats)))


# Slots


def slots_by_loop(wanted_SN: Tensor, width: int) -> tuple[list[list[int]], list[int]]:
    """The definition: the first `width` wanted positions, then N; and how many are left over."""
    capacity = wanted_SN.shape[1]
    packed, overflow = [], []
    for row in wanted_SN.tolist():
        places = [pos for pos, is_wanted in enumerate(row) if is_wanted]
        packed.append((places + [capacity] * width)[:width])
        overflow.append(max(len(places) - width, 0))
    return packed, overflow


@settings(max_examples=150, deadline=None, derandomize=True)
@given(wanted(), st.integers(1, 30))
def test_slots_are_the_first_wanted_positions(wanted_SN: Tensor, width: int) -> None:
    """Ascending, from the left, without gaps, padded by N; what does not fit is counted, not wrapped around."""
    packed_SW, overflow_S = slots(wanted_SN, width)
    assert packed_SW.dtype == torch.int64
    assert (packed_SW.tolist(), overflow_S.tolist()) == slots_by_loop(wanted_SN, width)
    assert (packed_SW.diff(dim=1) >= 0).all()


def test_the_loop_notices_a_missing_position() -> None:
    """Negative control: the comparison fails when one wanted position is left out."""
    wanted_SN = torch.tensor([[True, False, True, True]])
    fewer_SN = torch.tensor([[True, False, False, True]])
    assert slots(fewer_SN, 3)[0].tolist() != slots_by_loop(wanted_SN, 3)[0]
    assert slots(wanted_SN, 2)[1].tolist() != slots_by_loop(fewer_SN, 2)[1]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(wanted(), st.integers(1, 30), st.sampled_from([torch.int64, torch.float32, torch.bool]))
def test_spread_puts_the_columns_back(wanted_SN: Tensor, width: int, dtype: torch.dtype) -> None:
    """Values at their positions, zero elsewhere; empty slots and those that are not valid go nowhere."""
    capacity = wanted_SN.shape[1]
    slot_SW, _ = slots(wanted_SN, width)
    valid_SW = (slot_SW < capacity) & (slot_SW % 3 != 1)
    value_SW = (1 + torch.arange(slot_SW.numel()).view_as(slot_SW)).to(dtype)
    out_SN = spread(value_SW, slot_SW, valid_SW, capacity)
    expected_SN = torch.zeros(wanted_SN.shape, dtype=dtype)
    for seat, slot in valid_SW.nonzero().tolist():
        expected_SN[seat, slot_SW[seat, slot]] = value_SW[seat, slot]
    assert out_SN.dtype == dtype
    assert torch.equal(out_SN, expected_SN)


def test_spread_takes_the_valid_columns_only() -> None:
    """Negative control: the same call with one more valid column differs."""
    value_SW, pos_SW = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 3, 4]])
    some_SN = spread(value_SW, pos_SW, torch.tensor([[True, True, False]]), 4)
    assert some_SN.tolist() == [[5, 0, 0, 6]]
    assert spread(value_SW, pos_SW, torch.tensor([[True, False, False]]), 4).tolist() != some_SN.tolist()


# Packing


@dataclass(frozen=True)
class Ask:
    """The arguments of `pack`."""

    canvas: Canvas
    run_SN: Tensor
    see_SN: Tensor
    scratch: Scratch | None

    def pack(self, per_seat: int | None = None) -> RowPlan:
        return pack(self.canvas, self.run_SN, self.see_SN, self.scratch, per_seat=per_seat)

    @property
    def num_columns(self) -> int:
        return self.canvas.capacity + 1 + (0 if self.scratch is None else self.scratch.pos_SX.shape[1])


def ask(num_seats: int = 3, capacity: int = 8, num_scratch: int | None = 4, num_live: int = 3, seed: int = 0) -> Ask:
    """Random tokens, ends, views and scratch columns; seats may have nothing to run."""
    generator = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def chance(*shape: int) -> Tensor:
        odds = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator)
        return torch.rand(*shape, generator=generator) < odds

    canvas = Canvas.empty(num_seats, capacity, MASK, "cpu")
    canvas.token_SN.copy_(randint(0, MASK + 1, num_seats, capacity))
    canvas.end_S.copy_(randint(0, capacity + 1, num_seats))
    scratch = None
    if num_scratch is not None:
        scratch = Scratch(
            token_SX=randint(0, MASK, num_seats, num_scratch),
            pos_SX=randint(0, capacity, num_seats, num_scratch),
            valid_SX=chance(num_seats, num_scratch),
            live_SJ=randint(0, capacity + num_scratch, num_seats, num_live),
            canvas_bits_SJ=chance(num_seats, num_live),
            bits_SXJ=chance(num_seats, num_scratch, num_live),
            shadow_SN=chance(num_seats, capacity),
        )
    return Ask(canvas, chance(num_seats, capacity), randint(0, capacity + 1, num_seats, capacity), scratch)


Rows = list[dict[str, Any]]


def rows_by_loop(given: Ask, per_seat: int | None) -> tuple[Rows, list[int]]:
    """The definition: seat by seat, canvas positions, then scratch columns; and how many had no room."""
    canvas, scratch, out, overflow = given.canvas, given.scratch, [], []
    nothing = [] if scratch is None else [False] * scratch.live_SJ.shape[1]
    for seat in range(canvas.num_seats):
        rows: Rows = []
        for pos in range(canvas.capacity):
            if given.run_SN[seat, pos]:
                bits = [] if scratch is None else scratch.canvas_bits_SJ[seat].tolist()
                token, see = int(canvas.token_SN[seat, pos]), int(given.see_SN[seat, pos])
                rows.append({"token": token, "pos": pos, "column": pos, "see": see, "bits": bits})
        for x in range(0 if scratch is None else scratch.pos_SX.shape[1]):
            assert scratch is not None
            if scratch.valid_SX[seat, x]:
                token, pos = int(scratch.token_SX[seat, x]), int(scratch.pos_SX[seat, x])
                bits, see = scratch.bits_SXJ[seat, x].tolist(), int(canvas.end_S[seat])
                rows.append({"token": token, "pos": pos, "column": canvas.capacity + x, "see": see, "bits": bits})
        room = len(rows) if per_seat is None else per_seat
        overflow.append(max(len(rows) - room, 0))
        last = given.num_columns - 1
        padding = {"token": MASK, "pos": 0, "column": last, "see": 0, "bits": nothing}
        rows = [*rows, *[padding] * max(room - len(rows), 0)][:room]
        out += [{"seat": seat, **row} for row in rows]
    return out, overflow


def rows_of(plan: RowPlan) -> Rows:
    bits = [[]] * len(plan.token_M) if plan.live is None else plan.live.bits_MJ.tolist()
    fields = (plan.seat_M, plan.token_M, plan.pos_M, plan.column_M, plan.see_M)
    names = ("seat", "token", "pos", "column", "see", "bits")
    return [dict(zip(names, row)) for row in zip(*(field.tolist() for field in fields), bits)]


def check(given: Ask, per_seat: int | None, plan: RowPlan | None = None) -> None:
    """The plan is the loop's in every field."""
    plan = plan or given.pack(per_seat)
    rows, overflow = rows_by_loop(given, per_seat)
    padding = given.num_columns - 1
    assert rows_of(plan) == rows
    assert plan.overflow_S.tolist() == overflow
    assert plan.per_seat == per_seat
    real = [number for number, row in enumerate(rows) if row["column"] != padding]
    assert plan.num_rows_S.tolist() == [
        sum(rows[number]["seat"] == seat for number in real) for seat in range(given.canvas.num_seats)
    ]
    row_SE = torch.full((given.canvas.num_seats, given.num_columns), -1)
    for number in real:
        row_SE[rows[number]["seat"], rows[number]["column"]] = number
    assert torch.equal(plan.row_SE, row_SE)
    reach = max([row["see"] for row in rows], default=0)
    assert plan.num_keys == (reach if per_seat is None else given.canvas.capacity)
    assert (plan.live is None) == (given.scratch is None)
    if plan.live is not None and given.scratch is not None:
        assert torch.equal(plan.live.column_SJ, given.scratch.live_SJ)
        assert torch.equal(plan.live.shadow_SN, given.scratch.shadow_SN)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    return ask(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 12)),
        draw(st.sampled_from([None, 0, 1, 5])),
        draw(st.integers(0, 4)),
        draw(st.integers(0, 10_000)),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(asks())
def test_ragged_rows_are_the_loops(given: Ask) -> None:
    """Only what is wanted, so nothing overflows."""
    check(given, None)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(asks(), st.integers(1, 20))
def test_rows_of_fixed_shape_are_the_loops(given: Ask, per_seat: int) -> None:
    """The first that fit, canvas before scratch; the rest is counted. Padding is MASK at 0 in the last column, sees
    nothing and holds no bit."""
    check(given, per_seat)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(asks())
def test_both_shapes_hold_the_same_rows(given: Ask) -> None:
    """With room for all, the fixed plan is the ragged one and padding."""
    padding, plan = given.num_columns - 1, given.pack(given.num_columns)
    assert [row for row in rows_of(plan) if row["column"] != padding] == rows_of(given.pack())
    assert not plan.overflow_S.any()


def test_types_are_those_that_the_pool_and_attention_take() -> None:
    for per_seat in (None, 5):
        plan = ask().pack(per_seat)
        found = (plan.token_M, plan.pos_M, plan.see_M, plan.seat_M, plan.column_M, plan.row_SE, plan.num_rows_S)
        assert [each.dtype for each in found] == [torch.int32] * 3 + [torch.int64] * 4


SCRATCH_FIELDS = ["token_SX", "pos_SX", "valid_SX", "live_SJ", "canvas_bits_SJ", "bits_SXJ", "shadow_SN"]


def changed(given: Ask, name: str) -> Ask:
    """The same call but for one argument."""
    canvas = Canvas(**vars(given.canvas))
    if name in ("run_SN", "see_SN"):
        return replace(given, **{name: getattr(given, name).roll(1, 1)})
    if name in ("token_SN", "end_S"):
        setattr(canvas, name, (getattr(canvas, name) + 1) % 8)
        return replace(given, canvas=canvas)
    value = getattr(given.scratch, name)
    other = ~value if value.dtype == torch.bool else (value + 1) % 8
    return replace(given, scratch=replace(given.scratch, **{name: other}))  # type: ignore[type-var]


def ordinary() -> Ask:
    """Canvas and scratch rows in each of three seats, at most ten of them."""
    given = ask(seed=3)
    assert given.scratch is not None
    given.run_SN[:, :3] = torch.tensor([True, False, True])
    given.scratch.valid_SX[:, :2] = torch.tensor([True, False])
    return given


@pytest.mark.parametrize("per_seat", [None, 10])
@pytest.mark.parametrize("name", ["run_SN", "see_SN", "token_SN", "end_S", *SCRATCH_FIELDS])
def test_the_loop_notices_every_argument(name: str, per_seat: int | None) -> None:
    """Negative control: a plan of other arguments is not the loop's."""
    given = ordinary()
    check(given, per_seat)
    with pytest.raises(AssertionError):
        check(given, per_seat, changed(given, name).pack(per_seat))


@pytest.mark.parametrize("per_seat", [None, 10])
def test_the_loop_notices_wrong_fields(per_seat: int | None) -> None:
    """Negative control: so it does with a field that follows from others."""
    given = ordinary()
    plan = given.pack(per_seat)
    wrong: dict[str, Any] = {
        "row_SE": plan.row_SE.roll(1, 1),
        "num_rows_S": plan.num_rows_S + 1,
        "overflow_S": plan.overflow_S + 1,
        "num_keys": plan.num_keys - 1,
        "per_seat": 11,
    }
    for name, value in wrong.items():
        with pytest.raises(AssertionError):
            check(given, per_seat, replace(plan, **{name: value}))


def test_a_fixed_shape_reads_nothing_from_the_device() -> None:
    """Tensors without values are enough for it. A ragged plan has as many rows as are wanted, and must look."""
    given = ask()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert given.pack(5).token_M.shape == (15,)
        with pytest.raises(DynamicOutputShapeException):
            given.pack()
