"""What the rule will decide, as far as that is known before the pass.

S seats, N positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.core.canvas import Canvas
from unmask.decoding.params import DecodeParams, SeatParams
from unmask.decoding.rule import chance_order, filled, quota, rank


class RandomOrder:
    """The candidates in the order that ``remasking="random"`` decides them in, as many as the schedule has for the
    pass, or one; and those that chance decides.

    Of a random order these are just what the pass decides: it ranks by the same numbers. Other rules may have them, and
    choose among the candidates that run.
    """

    def __init__(self, *, drafted: bool = False) -> None:
        """``drafted``: a drafter commits beside the schedule."""
        self.drafted = drafted

    def foreseen(self, canvas: Canvas, candidate_SN: Tensor, params: DecodeParams) -> Tensor:
        """bool [S, N]"""
        pos_1N = canvas.pos_1N()
        chance_SN = chance_order(canvas, params, pos_1N)
        count_S = torch.where(params.capped_S, quota(canvas, params), 1)
        next_SN = rank(chance_SN.masked_fill(~candidate_SN, -1)) < count_S[:, None]
        if params.needs.fill:
            next_SN = next_SN | filled(canvas, params, pos_1N)
        return candidate_SN & next_SN

    def most_foreseen(self, reach: int, params: SeatParams) -> int:
        """What the schedule has for a pass at most; what it leaves for later ones may add up."""
        if params.fill or params.carries:
            return reach
        return min(max(params.quota, default=1), reach)

    def most_decided(self, reach: int, params: SeatParams) -> int:
        """Without a schedule a refresh, which scores every candidate, may decide them all."""
        return self.most_foreseen(reach, params) if params.quota and not self.drafted else reach
