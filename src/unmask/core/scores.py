"""What a pass says about the positions that may be decided.

S seats, N positions or, in a step of fixed shape, slots (W where it may be either).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.core.canvas import positions


@dataclass(frozen=True)
class Scores:
    """Per column; meaningless where ``scored`` is False."""

    pos_SW: Tensor
    """int: canvas position of each column; one row serves all seats when columns are positions."""
    scored_SN: Tensor
    """bool: a row for this position ran."""
    token_SN: Tensor
    """int64: the predicted token."""
    prob_SN: Tensor
    """float32: its probability."""
    neg_doubt_SN: Tensor
    """float32: probability - 1, exact near 0, where a probability itself is rounded to 6e-8. Candidates are ranked by
    it: whoever replaces one replaces both."""
    neg_lag_SN: Tensor
    """float32: its lead over the runner-up - 1, as exact; zeros unless somebody ranks by it."""
    neg_entropy_SN: Tensor
    """float32: sum p log p in nats; zeros unless somebody ranks by it."""

    @classmethod
    def empty(cls, num_seats: int, capacity: int, device: torch.device | str) -> Scores:
        """Nothing scored."""

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_seats, capacity, dtype=dtype, device=device)

        real = (zeros(torch.float32) for _ in range(4))
        return cls(positions(capacity, device), zeros(torch.bool), zeros(torch.int64), *real)
