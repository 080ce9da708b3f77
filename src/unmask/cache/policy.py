"""What is recomputed in a pass? The protocol of cache policies, and the one that caches nothing.

S seats, N positions.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from unmask.core.canvas import Canvas


class CachePolicy(Protocol):
    """One member of the axis."""

    def rows(self, canvas: Canvas) -> Tensor:
        """bool [S, N]: the positions that run in this pass."""
        ...


class Recompute:
    """Everything, every time: exact, and the yardstick of all others."""

    def rows(self, canvas: Canvas) -> Tensor:
        return canvas.visible_SN()


POLICIES: dict[str, type[Recompute]] = {"recompute": Recompute}
