"""What is recomputed in a pass? The protocol of cache policies, and those that need nothing but the canvas.

S seats, N positions.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from unmask.core.canvas import OPEN, TO_SEAL, Canvas


class CachePolicy(Protocol):
    """One member of the axis."""

    def rows(self, canvas: Canvas) -> Tensor:
        """bool [S, N]: the positions that run in this pass."""
        ...


class Recompute:
    """Everything, every time: exact, and the yardstick of all others."""

    def rows(self, canvas: Canvas) -> Tensor:
        return canvas.visible_SN()


class Prefix:
    """Fast-dLLM's prefix cache: the whole canvas when a block begins, then that block and all behind it."""

    def rows(self, canvas: Canvas) -> Tensor:
        return canvas.visible_SN() & ((canvas.block_SN >= canvas.current_block_S()[:, None]) | _begins(canvas))


class Dual:
    """Fast-dLLM's dual cache: the whole canvas when a block begins, then the rows of that block only."""

    def rows(self, canvas: Canvas) -> Tensor:
        return canvas.visible_SN() & ((canvas.block_SN == canvas.current_block_S()[:, None]) | _begins(canvas))


def _begins(canvas: Canvas) -> Tensor:
    """bool [S, 1]: nothing of the current block was committed yet, so this is its first pass."""
    inside_SN = canvas.visible_SN() & (canvas.block_SN == canvas.current_block_S()[:, None])
    return ~(inside_SN & (canvas.commit_pass_SN > 0)).any(1, keepdim=True)


class BlockCausal:
    """D2F: the blocks in flight, and those that are complete and run once more before they are left alone."""

    def rows(self, canvas: Canvas) -> Tensor:
        state_SN = canvas.block_state_SK.gather(1, canvas.block_SN.long())
        return canvas.visible_SN() & (state_SN >= OPEN) & (state_SN <= TO_SEAL)


POLICIES: dict[str, type[Recompute]] = {"recompute": Recompute}
