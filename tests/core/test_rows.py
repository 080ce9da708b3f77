"""Row plans of fixed shape: packing without a look at the values, and rows of the canvas.

S seats, N positions, Q rows a seat
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask.core import layout
from unmask.core.canvas import Canvas
from unmask.core.rows import FixedPlan, canvas_rows, join, slots

MASK = 9


@st.composite
def wanted(draw: st.DrawFn) -> Tensor:
    """bool [S, N]"""
    num_seats, capacity = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    row = st.lists(st.booleans(), min_size=capacity, max_size=capacity)
    return torch.tensor(draw(st.lists(row, min_size=num_seats, max_size=num_seats)))


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


def canvas(num_seats: int = 3, prompt: int = 2, length: int = 7, capacity: int = 10) -> Canvas:
    """Seats 0, 2, .. taken by requests whose prompt token tells the seat; the others free."""
    made = Canvas.empty(num_seats, capacity, MASK, "cpu")
    for seat in range(0, num_seats, 2):
        token_N = torch.tensor([seat + 1] * prompt + [MASK] * (length - prompt))
        made.place(seat, token_N, prompt=prompt, block_N=layout.blocks(length, prompt, 3))
    return made


def plan_of(made: Canvas, num_rows: int) -> FixedPlan:
    recompute_SN = made.visible_SN() & (made.pos_1N() != 1)
    return canvas_rows(made, recompute_SN, made.end_S[:, None].expand(-1, made.capacity), num_rows, trash=99)


@pytest.mark.parametrize("num_rows", [2, 6, 8])
def test_canvas_rows_write_their_own_entry_and_padding_the_trash(num_rows: int) -> None:
    """Every row carries its position's token and writes there; padding sees nothing and writes where nobody reads."""
    made = canvas()
    plan = plan_of(made, num_rows)
    for seat in range(made.num_seats):
        wanted_pos = [0, 2, 3, 4, 5, 6][:num_rows] if seat != 1 else []
        assert plan.valid_SQ[seat].sum() == len(wanted_pos)
        for row in range(num_rows):
            if row < len(wanted_pos):
                pos = wanted_pos[row]
                assert plan.pos_SQ[seat, row] == plan.write_SQ[seat, row] == pos
                assert plan.token_SQ[seat, row] == made.token_SN[seat, pos]
                assert plan.see_SQ[seat, row] == 7
            else:
                assert not plan.valid_SQ[seat, row]
                assert plan.write_SQ[seat, row] == 99
                assert plan.see_SQ[seat, row] == 0
    assert plan.live_SJ.shape == (3, 0)
    assert plan.live_bits_SQJ.shape == (3, num_rows, 0)
    assert not plan.shadow_SN.any()


def test_join_appends_rows_and_takes_the_second_parts_view() -> None:
    """Row fields follow one another; live list, bits and shadow are the second part's."""
    made = canvas()
    first, second = plan_of(made, 4), plan_of(made, 3)
    whole = join(first, second)
    for field in fields(FixedPlan):
        got, one, two = (getattr(plan, field.name) for plan in (whole, first, second))
        if field.name in ("live_SJ", "live_bits_SQJ", "shadow_SN"):
            assert got is two
        else:
            assert torch.equal(got, torch.cat((one, two), 1)), field.name
