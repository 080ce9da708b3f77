"""What is recomputed in a pass? Nothing else is a cache's business: rows write their K/V in any case.

S seats, N positions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from unmask.cache.context import MassSpec, PagedContext
from unmask.cache.pool import PagePool, PlaneSpec
from unmask.core.canvas import OPEN, TO_SEAL, Canvas, put
from unmask.core.rows import RowPlan
from unmask.models.attention import LayerGate
from unmask.models.config import ModelConfig


class Limits(Protocol):
    """The requests' parameters that policies read, one value a seat."""

    refresh_S: Tensor
    """int32: leftmost undecided positions that are recomputed."""
    track_S: Tensor
    """int32: decided positions that are recomputed."""
    interval_S: Tensor
    """int32: everything is recomputed every so many passes of the request; 0 never."""


class SeatLimits(Protocol):
    """The same of one request, on the host."""

    @property
    def refresh(self) -> int: ...
    @property
    def track(self) -> int: ...


class CachePolicy:
    """One member of the axis. A seat whose next pass is *due* recomputes its whole canvas: such a pass costs many times
    an ordinary one, and waits for its share of the row budget."""

    mass: MassSpec | None = None
    """What `observe` wants to know; None: nothing."""
    refreshes: bool = True
    """A request begins with a refresh."""
    recurs: bool = False
    """What a pass commits can make the next one a refresh."""
    static: bool = True
    """Its ordinary passes have a fixed shape and can be captured; without, every pass is ragged."""

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:
        """bool [S]: the next pass is a refresh."""
        return _first_or_interval(canvas, limits)

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        """bool [S, N]: the positions that run in this pass, given those that may be decided in it."""
        raise NotImplementedError

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:
        """Most rows that a request's ordinary pass can need, of a canvas of ``prompt + answer`` positions.

        ``reach`` is the most positions that its frontier has as candidates at a time.
        """
        raise NotImplementedError

    def most_rows_left(self, prompt: int, answer: int, reach: int, limits: SeatLimits, undecided: int) -> int:  # noqa: ARG002
        """The same of a request of whose positions ``undecided`` were so before its last pass: what was decided in
        that one may run in the next. Less than `most_rows` only where rows become fewer as the answer fills."""
        return self.most_rows(prompt, answer, reach, limits)

    def counted(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        """bool [S, N]: whose attention counts as mass."""
        return candidate_SN

    def observe(self, canvas: Canvas, mass_SN: Tensor) -> None:
        """Take note of what the pass showed."""

    def planes(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, PlaneSpec]:  # noqa: ARG002
        """What it keeps of every position in every layer, besides K and V."""
        return {}

    def gate(
        self,
        canvas: Canvas,  # noqa: ARG002
        limits: Limits,  # noqa: ARG002
        plan: RowPlan,  # noqa: ARG002
        context: PagedContext,  # noqa: ARG002
        pool: PagePool,  # noqa: ARG002
        most_new: int | None,  # noqa: ARG002
    ) -> LayerGate | None:
        """What runs the layers of the next pass, where rows are chosen inside it.

        ``most_new``: in a pass of fixed shape, the most positions of a seat that the last pass can have decided.
        """
        return None


def _first_or_interval(canvas: Canvas, limits: Limits) -> Tensor:
    return first_or_every(canvas, limits.interval_S)


def first_or_every(canvas: Canvas, interval_S: Tensor) -> Tensor:
    """bool [S]: the first pass, and every so many; by the request's own count, never the engine's."""
    return (canvas.pass_S == 0) | ((interval_S > 0) & (canvas.pass_S % interval_S.clamp(min=1) == 0))


def rows_a_layer(num_computed_S: Tensor, num_layers: int) -> Tensor:
    """int64 [S]: rows that a layer computed on average, rounded, of their sum over the layers."""
    return (2 * num_computed_S + num_layers) // (2 * num_layers)


class Recompute(CachePolicy):
    """Everything, every time: exact, and the yardstick of all others."""

    refreshes = False

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(canvas.active_S)  # every pass is the same: nothing to wait for

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        return canvas.visible_SN()

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        return prompt + answer


class Prefix(CachePolicy):
    """Fast-dLLM's prefix cache: the whole canvas when a block begins, then that block and all behind it."""

    recurs = True

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:
        return _first_or_interval(canvas, limits) | _begins(canvas)

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        ahead_SN = canvas.block_SN >= canvas.current_block_S()[:, None]
        return canvas.visible_SN() & (ahead_SN | self.due(canvas, limits)[:, None])

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        return answer


class Dual(CachePolicy):
    """Fast-dLLM's dual cache: the whole canvas when a block begins, then the rows of that block only."""

    recurs = True

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:
        return _first_or_interval(canvas, limits) | _begins(canvas)

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        inside_SN = canvas.block_SN == canvas.current_block_S()[:, None]
        return canvas.visible_SN() & (inside_SN | self.due(canvas, limits)[:, None])

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        return min(reach, answer)


def _begins(canvas: Canvas) -> Tensor:
    """bool [S]: nothing of the current block was committed yet, so this is its first pass."""
    inside_SN = canvas.visible_SN() & (canvas.block_SN == canvas.current_block_S()[:, None])
    return ~(inside_SN & (canvas.commit_pass_SN > 0)).any(1)


class BlockCausal(CachePolicy):
    """D2F's exact cache: the blocks in flight, and those that are complete and run once more before they are left
    alone. Needs the pipeline's block states and its visibility: then nothing that is left alone would change."""

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:  # noqa: ARG002
        return canvas.pass_S == 0  # the prompt, once

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        state_SN = canvas.block_state_SK.gather(1, canvas.block_SN.long())
        return canvas.visible_SN() & (state_SN >= OPEN) & (state_SN <= TO_SEAL)

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        return min(2 * reach, answer)  # as many blocks may be due for their last pass as are in flight


class Tracked(CachePolicy):
    """Flash-Cache (arXiv 2609.26796 section 3.1): the leftmost undecided positions, what was just committed, and the
    decided positions that the undecided ones look at most.

    A committed token's K/V is still MASK's until the next pass runs it: so all new ones run, beyond the budget too.
    ``refresh_rows`` counts the attention of the refresh window (the paper's text) instead of the decode window (its
    code). ``shift`` is the network's logit shift: the rows that score the candidates run too.
    """

    def __init__(self, mass: MassSpec | None = None, *, refresh_rows: bool = False, shift: int = 0) -> None:
        self.mass = mass or MassSpec()
        self.refresh_rows, self.shift = refresh_rows, shift

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        wanted_SN = candidate_SN | self._window(canvas, limits) | self._tracked(canvas, limits)
        if self.shift:  # row p - shift scores p
            wanted_SN = wanted_SN | torch.nn.functional.pad(candidate_SN[:, self.shift :], (0, self.shift))
        return canvas.visible_SN() & (wanted_SN | self.due(canvas, limits)[:, None])

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:
        undecided = max(reach, min(limits.refresh, answer)) + (reach if self.shift else 0)
        return min(undecided + max(limits.track, reach), prompt + answer)

    def counted(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        return candidate_SN | self._window(canvas, limits) if self.refresh_rows else candidate_SN

    def observe(self, canvas: Canvas, mass_SN: Tensor) -> None:
        put(canvas.mass_SN, canvas.active_S[:, None], mass_SN)

    def _window(self, canvas: Canvas, limits: Limits) -> Tensor:
        undecided_SN = canvas.undecided_SN()
        return undecided_SN & (undecided_SN.cumsum(1) <= limits.refresh_S[:, None])

    def _tracked(self, canvas: Canvas, limits: Limits) -> Tensor:
        """All that the last pass committed, and the heaviest of the rest as far as the budget goes."""
        new_SN = canvas.new_SN()
        room_S1 = (limits.track_S - new_SN.sum(1))[:, None]
        older_SN = canvas.visible_SN() & canvas.final_SN & ~new_SN
        order_SN = canvas.mass_SN.masked_fill(~older_SN, -torch.inf).argsort(dim=1, descending=True, stable=True)
        place_SN = torch.empty_like(order_SN).scatter_(1, order_SN, canvas.pos_1N().long().expand_as(order_SN))
        return new_SN | (older_SN & (place_SN < room_S1))
