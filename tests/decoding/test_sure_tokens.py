"""Which of several tokens that are all but certain goes first."""

from __future__ import annotations

import torch

from unmask.config import SamplingParams
from unmask.core import layout
from unmask.core.canvas import Canvas
from unmask.core.scores import Scores
from unmask.decoding.frontier import Whole
from unmask.decoding.params import DecodeParams, seat_params
from unmask.decoding.rule import choose

SIZE, MASK = 4, 9


def chosen(neg_doubts: list[float]) -> list[bool]:
    """What a schedule of one token a pass takes of positions whose probability rounds to 1 throughout."""
    canvas, params = Canvas.empty(1, SIZE, MASK, "cpu", 3), DecodeParams(1, SIZE, "cpu")
    canvas.place(0, torch.full((SIZE,), MASK, dtype=torch.int32), prompt=0, block_N=layout.blocks(SIZE, 0, 0))
    said = SamplingParams(max_tokens=SIZE, steps=SIZE, ignore_eos=True)
    params.write(0, seat_params(said, kind="even", masks_per_block=[SIZE], model_eos=(8,), seed=0))
    empty = Scores.empty(1, SIZE, "cpu")
    neg_doubt_SN = torch.tensor([neg_doubts])
    everywhere_SN = torch.ones(1, SIZE, dtype=torch.bool)
    scores = Scores(
        empty.pos_SW,
        everywhere_SN,
        torch.ones(1, SIZE, dtype=torch.int64),
        1 + neg_doubt_SN,
        neg_doubt_SN,
        empty.neg_lag_SN,
        empty.neg_entropy_SN,
    )
    assert (scores.prob_SN == 1).all()
    return choose(canvas, Whole().advance(canvas, params), scores, params)[0].tolist()


def test_the_surest_goes_first_though_all_round_to_one() -> None:
    assert chosen([-3e-9, -2e-9, -1e-9, -4e-9]) == [False, False, True, False]
    assert chosen([-1e-9, -2e-9, -3e-9, -4e-9]) == [True, False, False, False]


def test_of_equals_the_leftmost() -> None:
    assert chosen([-2e-9, -1e-9, -1e-9, -1e-9]) == [False, True, False, False]
