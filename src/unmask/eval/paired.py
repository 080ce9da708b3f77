"""Two runs over the same problems: the difference of their accuracies with an interval, and one number for a curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Z95 = 1.959964
"""Of a normal distribution, between its 2.5th and its 97.5th percentile."""
MOST_LOST = 5.0
"""Points of accuracy under a curve's first point at which AUP drops a point."""
STEEPNESS = 3.0
"""Of AUP's weight: half the best accuracy counts exp(-1.5) of its area."""


@dataclass(frozen=True)
class Difference:
    """Accuracy of one run less that of another, over the same requests, with 95%."""

    difference: float
    low: float
    high: float
    num_better: int
    """Requests of which more problems are right, of which fewer are."""
    num_worse: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired_difference(ours: Sequence[int], theirs: Sequence[int], per_request: int = 1) -> Difference:
    """From the right answers of every request in both runs, of ``per_request`` problems each.

    The interval is Bonett and Price's for paired proportions (adjusted Wald, 2012): it adds one problem that only we
    have right and one that only they have, so that runs without any difference do not claim certainty. A request is
    the unit that is drawn, since the problems of one share a canvas; with one problem a request this is their formula.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} requests: a paired comparison needs the same, one at least")
    shares = [(a - b) / per_request for a, b in zip(ours, theirs)]
    adjusted = [*shares, 1 / per_request, -1 / per_request]
    mean = sum(adjusted) / len(adjusted)
    variance = sum(share**2 for share in adjusted) / len(adjusted) - mean**2
    half = Z95 * math.sqrt(variance / len(adjusted))
    return Difference(
        difference=sum(shares) / len(shares),
        low=max(mean - half, -1.0),
        high=min(mean + half, 1.0),
        num_better=sum(share > 0 for share in shares),
        num_worse=sum(share < 0 for share in shares),
    )


def at_accuracy(curve: Sequence[tuple[float, float]], accuracy: float) -> float | None:
    """The highest rate at this accuracy of a curve of points (accuracy, rate): of those that are as good, and in a
    straight line between neighbours; None if it is never as good."""
    rates = [rate for right, rate in curve if right >= accuracy]
    for (low, left), (high, right) in itertools.pairwise(sorted(curve)):
        if low < accuracy <= high:
            rates.append(left + (right - left) * (accuracy - low) / (high - low))
    return max(rates, default=None)


def aup(points: Sequence[tuple[float, float]], best: float) -> float:
    """Accuracy under parallelism (d3LLM, arXiv 2601.07568) of points (tokens a pass, accuracy in percent).

    The area under the curve in order of tokens a pass, where accuracy y counts y exp(-3 (1 - y / best)); ``best`` is
    that of any method on the same problems. What lies left of the first point counts in full. Points that lose more
    than 5 points of accuracy to the first are dropped.
    """
    if not points:
        raise ValueError("a curve has one point at least")
    ordered = sorted(points, key=lambda point: (point[0], -point[1]))
    first, reached = ordered[0]
    kept = [(rate, accuracy) for rate, accuracy in ordered if accuracy >= reached - MOST_LOST]
    area = first * reached
    for (left, low), (right, high) in itertools.pairwise(kept):
        area += (right - left) * (_weighted(low, best) + _weighted(high, best)) / 2
    return area


def _weighted(accuracy: float, best: float) -> float:
    if best <= 0:
        return 0.0
    return accuracy * min(math.exp(-STEEPNESS * (1 - accuracy / best)), 1.0)
