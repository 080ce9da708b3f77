"""Where may tokens be decided now?

S seats, N positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.core.canvas import CLOSED, FULL, OPEN, SEALED, TO_SEAL, Canvas, put
from unmask.decoding.params import DecodeParams, SeatParams


@dataclass(frozen=True)
class FrontierView:
    """The answer for one pass."""

    candidate_SN: Tensor
    """bool: undecided positions that may be decided now."""
    rescue_group_SN: Tensor
    """int64: a group in which nothing commits gets its best candidate committed; -1: no such promise."""
    see_SN: Tensor
    """int32: a row at this position sees the positions [0, see)."""

    def at(self, slot_SC: Tensor) -> FrontierView:
        """The view of packed candidates: slots hold positions, or the capacity where they are empty."""
        pos_SC = slot_SC.clamp(max=self.candidate_SN.shape[1] - 1)
        there_SC = slot_SC < self.candidate_SN.shape[1]
        group_SC = torch.where(there_SC, self.rescue_group_SN.gather(1, pos_SC), -1)
        return FrontierView(there_SC, group_SC, self.see_SN)


class Frontier:
    """One member of the axis."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        """The candidates of the next pass. Changes nothing but block states."""
        raise NotImplementedError

    def retire(self, canvas: Canvas, params: DecodeParams) -> None:
        """After the commits of a step: what is done is left alone."""

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:
        """Most candidates that a request with ``answer`` positions can have at a time."""
        raise NotImplementedError


def _one_group(canvas: Canvas, candidate_SN: Tensor) -> FrontierView:
    """Every seat's candidates are one group: a pass that may commit commits at least one token of each request."""
    see_SN = canvas.end_S[:, None].expand(-1, canvas.capacity)
    return FrontierView(candidate_SN, torch.where(candidate_SN, 0, -1), see_SN)


class Whole(Frontier):
    """Anywhere on the canvas."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:  # noqa: ARG002
        return _one_group(canvas, canvas.undecided_SN())

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:  # noqa: ARG002
        return answer


class Blocks(Frontier):
    """In the leftmost block that has something undecided (semi-autoregressive).

    With ``lead``, while a block's first position is undecided it is the only candidate: networks with shifted logits
    score it from outside the block, which only the pass over the whole canvas does (Fast-dLLM's caches on Dream).
    """

    def __init__(self, *, lead: bool = False) -> None:
        self.lead = lead

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:  # noqa: ARG002
        candidate_SN = canvas.undecided_SN() & (canvas.block_SN == canvas.current_block_S()[:, None])
        if self.lead:
            before_SN = torch.cat((torch.full_like(canvas.block_SN[:, :1], -1), canvas.block_SN[:, :-1]), 1)
            first_SN = candidate_SN & (canvas.block_SN != before_SN)
            candidate_SN = candidate_SN & (first_SN | ~first_SN.any(1, keepdim=True))
        return _one_group(canvas, candidate_SN)

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:  # noqa: ARG002
        return min(block_length or answer, answer)


class Window(Frontier):
    """At the leftmost undecided positions, `decode_window` of them."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        undecided_SN = canvas.undecided_SN()
        return _one_group(canvas, undecided_SN & (undecided_SN.cumsum(1) <= params.window_S[:, None]))

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:  # noqa: ARG002
        return min(params.window, answer)


class BlockWindow(Window):
    """The same, inside the leftmost block that has something undecided."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        inside_SN = canvas.block_SN == canvas.current_block_S()[:, None]
        return _one_group(canvas, super().advance(canvas, params).candidate_SN & inside_SN)

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:
        return min(params.window, block_length or answer, answer)


class Pipeline(Frontier):
    """Several blocks in flight (D2F, arXiv 2508.09192; the order of events is that of the reference).

    A block is added once the last one is decided to `tau_add`, at most one a step; it decides tokens above the
    threshold only, until its predecessor is decided to `tau_act`: from then on it is fully activated, for good, and
    promised a commit in every step. Seats that drain end as the reference does: after an end of text the blocks in
    flight are finished, no more are added, and nothing is cut.
    """

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        self._add(canvas, params)
        self._activate(canvas, params)
        state_SN = canvas.block_state_SK.gather(1, canvas.block_SN.long())
        candidate_SN = canvas.undecided_SN() & ((state_SN == OPEN) | (state_SN == FULL))
        group_SN = torch.where(candidate_SN & (state_SN == FULL), canvas.block_SN.long(), -1)
        return FrontierView(candidate_SN, group_SN, self._see(canvas))

    def retire(self, canvas: Canvas, params: DecodeParams) -> None:
        """Blocks that ran once since they were complete are sealed; complete ones without an unfinished predecessor
        are due for that last pass. Seats that drain and have an end of text end with their last block in flight."""
        self._stop_adding(canvas, params)
        state_SK, active_S1 = canvas.block_state_SK, canvas.active_S[:, None]
        sealed_SK = torch.where(state_SK == TO_SEAL, SEALED, state_SK)
        masks_SK, _ = _masks_and_sizes(canvas)
        flying_SK = (state_SK == OPEN) | (state_SK == FULL)
        done_SK = flying_SK & ((masks_SK > 0).cumsum(1) == 0)
        put(state_SK, active_S1, torch.where(done_SK, TO_SEAL, sealed_SK))

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:
        return min(params.depth * (block_length or answer), answer)

    def _see(self, canvas: Canvas) -> Tensor:
        """A row sees up to the end of its own block."""
        zeros_SK = torch.zeros_like(canvas.block_state_SK, dtype=torch.int32)
        end_SN = torch.where(canvas.visible_SN(), canvas.pos_1N() + 1, 0)
        return zeros_SK.scatter_reduce(1, canvas.block_SN.long(), end_SN, "amax").gather(1, canvas.block_SN.long())

    def _add(self, canvas: Canvas, params: DecodeParams) -> None:
        state_SK, (masks_SK, size_SK) = canvas.block_state_SK, _masks_and_sizes(canvas)
        last_S1 = ((state_SK >= OPEN).sum(1, keepdim=True) - 1).clamp(min=0)
        next_S1 = (last_S1 + 1).clamp(max=state_SK.shape[1] - 1)
        exists_S1 = (size_SK.gather(1, next_S1) > 0) & (state_SK.gather(1, next_S1) == CLOSED)
        ready_S1 = _ratio(masks_SK, size_SK).gather(1, last_S1) >= params.tau_add_S[:, None]
        flying_S1 = ((state_SK >= OPEN) & (state_SK <= FULL)).sum(1, keepdim=True)
        opens_S1 = exists_S1 & ready_S1 & (flying_S1 < params.depth_S[:, None]) & canvas.active_S[:, None]
        now_S1 = state_SK.gather(1, next_S1)
        state_SK.scatter_(1, next_S1, torch.where(opens_S1, OPEN, now_S1))

    def _activate(self, canvas: Canvas, params: DecodeParams) -> None:
        state_SK = canvas.block_state_SK
        ripe_SK = _ratio(*_masks_and_sizes(canvas)) >= params.tau_act_S[:, None]
        after_SK = torch.cat((torch.zeros_like(ripe_SK[:, :1]), ripe_SK[:, :-1]), 1)
        state_SK.masked_fill_((state_SK == OPEN) & after_SK, FULL)

    def _stop_adding(self, canvas: Canvas, params: DecodeParams) -> None:
        is_end_SN = (canvas.token_SN[:, :, None] == params.eos_SE[:, None, :]).any(-1)
        decided_SN = canvas.final_SN & canvas.visible_SN() & (canvas.commit_pass_SN > 0)
        seen_S = (is_end_SN & decided_SN).any(1) & params.drains_S
        state_SN = canvas.block_state_SK.gather(1, canvas.block_SN.long())
        last_S = torch.where(canvas.visible_SN() & (state_SN >= OPEN), canvas.pos_1N() + 1, 0).amax(1)
        put(canvas.end_S, seen_S, torch.minimum(canvas.end_S, last_S.int()))


def _masks_and_sizes(canvas: Canvas) -> tuple[Tensor, Tensor]:
    """Undecided positions and visible positions of each block, [S, K]."""
    zeros_SK = torch.zeros_like(canvas.block_state_SK, dtype=torch.int32)
    block_SN = canvas.block_SN.long()
    masks_SK = zeros_SK.scatter_add(1, block_SN, canvas.undecided_SN().int())
    return masks_SK, zeros_SK.scatter_add(1, block_SN, canvas.visible_SN().int())


def _ratio(masks_SK: Tensor, size_SK: Tensor) -> Tensor:
    """Decided share of each block; blocks that are not there count as undecided, an empty prompt as decided."""
    is_prompt_K = torch.arange(size_SK.shape[1], device=size_SK.device) == 0
    # The quotient of the counts, not 1 - masks / size: 3 of 5 must reach 0.6 to the last bit.
    return torch.where(size_SK > 0, (size_SK - masks_SK) / size_SK.clamp(min=1), is_prompt_K.float())
