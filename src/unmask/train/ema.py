"""An exponential moving average of the weights, in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def decay_at(num_updates: int, decay: float) -> float:
    """min(decay, (1 + n) / (10 + n)): early on the average forgets its random start quickly."""
    return min(decay, (1 + num_updates) / (10 + num_updates))


class Ema:
    """average <- decay * average + (1 - decay) * weights, after every step."""

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self.weights = list(weights)
        self.average = [w.detach().float().clone() for w in weights]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        follow = 1 - decay_at(self.num_updates, self.decay)
        torch._foreach_lerp_(self.average, [w.detach().float() for w in self.weights], follow)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside, its own again after."""
        own = [w.detach().clone() for w in self.weights]
        _copy(self.weights, self.average)
        try:
            yield
        finally:
            _copy(self.weights, own)


@torch.no_grad()
def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, value in zip(to, source):
        target.copy_(value)
