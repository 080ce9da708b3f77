"""Where may tokens be decided now?

S seats, N positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unmask.core.canvas import Canvas
from unmask.decoding.params import DecodeParams


@dataclass(frozen=True)
class FrontierView:
    """The answer for one pass."""

    candidate_SN: Tensor
    """bool: undecided positions that may be decided now."""
    rescue_group_SN: Tensor
    """int64: a group in which nothing commits gets its best candidate committed; -1: no such promise."""


class Frontier(Protocol):
    """One member of the axis."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        """The candidates of this pass."""
        ...


def _one_group(candidate_SN: Tensor) -> FrontierView:
    """Every seat's candidates are one group: a pass that may commit commits at least one token of each request."""
    return FrontierView(candidate_SN, torch.where(candidate_SN, 0, -1))


class Whole:
    """Anywhere on the canvas."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:  # noqa: ARG002
        return _one_group(canvas.undecided_SN())


class Blocks:
    """In the leftmost block that has something undecided (semi-autoregressive)."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:  # noqa: ARG002
        undecided_SN = canvas.undecided_SN()
        beyond = torch.iinfo(canvas.block_SN.dtype).max
        current_S = torch.where(undecided_SN, canvas.block_SN, beyond).amin(1)
        return _one_group(undecided_SN & (canvas.block_SN == current_S[:, None]))


class Window:
    """At the leftmost undecided positions, `decode_window` of them."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        undecided_SN = canvas.undecided_SN()
        return _one_group(undecided_SN & (undecided_SN.cumsum(1) <= params.window_S[:, None]))


FRONTIERS: dict[str, type[Whole] | type[Blocks] | type[Window]] = {"whole": Whole, "blocks": Blocks, "window": Window}
