"""How many rows each layer may recompute: a two-sided Gaussian over the depth.

L layers, G positions of an answer
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unmask.errors import ConfigError, nearest

MIN_RATIO = 1 / 16
"""Least ratio before the peak, as released."""
MIN_FITTED = 3
"""Layers that a fit needs."""

Form = Literal["released", "paper"]
Array = NDArray[np.floating]


def _check_num(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; it is 1 or more")


def _check_ratio(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}; it lies in [0, 1]")
    return value


@dataclass(frozen=True)
class BudgetCurve:
    """The share of an answer's rows that a layer recomputes: `rho_p` at the peak, falling to both ends.

    >>> ratio_L = PUBLISHED["LLaDA-8B-Instruct"].ratios(32, max_ratio=0.25)
    >>> counts(256, ratio_L)[:7]
    [16, 16, 16, 16, 16, 16, 19]
    """

    mu: float
    """Where the peak is, as a fraction of the depth: 0 the first layer, 1 behind the last."""
    rho_s: float
    """At the start of the depth."""
    rho_p: float
    """At the peak."""
    rho_e: float
    """At the end of the depth."""

    def __post_init__(self) -> None:
        if not 0 <= self.mu <= 1:
            raise ConfigError(f"mu is {self.mu}; the peak lies in [0, 1], a fraction of the depth")
        if not 0 < self.rho_p <= 1:
            raise ConfigError(f"rho_p is {self.rho_p}; it lies in (0, 1]")
        for name in ("rho_s", "rho_e"):
            value = getattr(self, name)
            if not 0 < value <= self.rho_p:
                raise ConfigError(f"{name} is {value}; it lies in (0, rho_p], and rho_p is {self.rho_p}")

    def ratios(
        self,
        num_layers: int,
        *,
        max_ratio: float | None = None,
        mean_ratio: float | None = None,
        min_ratio: float | None = None,
        form: Form = "released",
    ) -> list[float]:
        """The ratio of each layer, none above the peak's.

        Args:
            max_ratio: scales the curve so that its peak has this value; 0 is nothing in any layer.
            mean_ratio: scales the curve so that the layers have this mean, before `min_ratio` lifts any of them.
            min_ratio: what layers before the peak have at least; those behind it may have less. None is `MIN_RATIO`
                for the released form, or the peak's ratio where that is less, and 0, no bound, for the paper's.
            form: "released" puts layer l = 0, 1, .. at depth l / L, so that the last one does not quite reach the
                end; "paper" spreads the layers evenly from the start to the end, which have rho_s and rho_e.

        Raises:
            ConfigError: a value out of its range, both scales, or a mean that needs a peak above 1.
        """
        _check_num("num_layers", num_layers)
        shape_L = [self._shape(depth) for depth in self._depths(num_layers, form)]
        peak = self._peak(shape_L, max_ratio, mean_ratio)
        least = (0.0 if form == "paper" else min(MIN_RATIO, peak)) if min_ratio is None else min_ratio
        if not 0 <= least <= peak:
            raise ConfigError(f"min_ratio is {least:.4g}; it lies in [0, {peak:.4g}], up to the peak of the curve")
        before_L = [depth < self.mu for depth in self._depths(num_layers, form)]
        return [max(peak * each, least) if before else peak * each for each, before in zip(shape_L, before_L)]

    def _depths(self, num_layers: int, form: Form) -> list[float]:
        if form not in ("released", "paper"):
            raise ConfigError(f"form is {form!r}; known: released, paper")
        if form == "paper" and num_layers == 1:
            return [self.mu]  # start and end at once
        last = num_layers if form == "released" else num_layers - 1
        return [layer / last for layer in range(num_layers)]

    def _shape(self, depth: float) -> float:
        """The curve over its peak, at most 1."""
        if depth < self.mu:
            return math.pow(self.rho_s / self.rho_p, ((depth - self.mu) / self.mu) ** 2)
        # The peak apart: it may be at the end, where the right side has no width.
        share = (depth - self.mu) / (1 - self.mu) if depth > self.mu else 0.0
        return math.pow(self.rho_e / self.rho_p, share**2)

    def _peak(self, shape_L: Sequence[float], max_ratio: float | None, mean_ratio: float | None) -> float:
        if max_ratio is not None and mean_ratio is not None:
            raise ConfigError(f"max_ratio {max_ratio} and mean_ratio {mean_ratio} both scale the curve; give one")
        if max_ratio is not None:
            return _check_ratio("max_ratio", max_ratio)
        if mean_ratio is None:
            return self.rho_p
        most = sum(shape_L) / len(shape_L)
        if not 0 <= mean_ratio <= most:
            raise ConfigError(
                f"mean_ratio is {mean_ratio}; it lies in [0, {most:.4g}], as the peak of this curve has at most 1"
            )
        return min(mean_ratio / most, 1.0)


PUBLISHED: Mapping[str, BudgetCurve] = {
    "LLaDA-8B-Instruct": BudgetCurve(mu=0.75, rho_s=0.03, rho_p=0.25, rho_e=0.13),
    "LLaDA-1.5": BudgetCurve(mu=0.80, rho_s=0.03, rho_p=0.25, rho_e=0.13),
    "Dream-v0-Instruct-7B": BudgetCurve(mu=0.50, rho_s=0.05, rho_p=0.30, rho_e=0.25),
}
"""The curves that SPA-Cache's authors measured, by model."""


def published(model: str) -> BudgetCurve:
    """The curve of a model: its name, or a path or hub id that ends in it.

    Raises:
        ConfigError: nobody has published one.
    """
    name = model.rstrip("/").rpartition("/")[-1]
    if name not in PUBLISHED:
        raise ConfigError(f"no budget curve is published for {name!r}; {nearest(name, PUBLISHED)}")
    return PUBLISHED[name]


def uniform(num_layers: int, ratio: float) -> list[float]:
    """The same ratio in every layer."""
    _check_num("num_layers", num_layers)
    return [_check_ratio("ratio", ratio)] * num_layers


def counts(num_positions: int, ratios: Sequence[float]) -> list[int]:
    """Rows of ``num_positions`` that each layer recomputes: the whole part of the ratio's, and one at least, unless
    the ratio is 0."""
    _check_num("num_positions", num_positions)
    return [max(int(ratio > 0), int(num_positions * _check_ratio("ratio", ratio))) for ratio in ratios]


# --- from measurements ---


def fit(drift_per_layer: Sequence[float]) -> BudgetCurve:
    """The curve nearest to the mean drift of each layer, layer l of L at depth l / L: least squares of the logarithms.

    Its level is the drifts' own, and 1 at most: scale it by `max_ratio` or `mean_ratio`. A side of the peak with
    fewer than two layers is flat, since one layer fixes no slope beyond itself.

    Raises:
        ConfigError: fewer than `MIN_FITTED` layers, or a drift that is not a positive number.
    """
    if len(drift_per_layer) < MIN_FITTED:
        raise ConfigError(f"drifts of {len(drift_per_layer)} layers; a curve needs {MIN_FITTED} or more")
    for layer, drift in enumerate(drift_per_layer):
        if not 0 < drift < math.inf:
            raise ConfigError(f"the drift of layer {layer} is {drift}; a mean drift is positive and finite")
    log_L = np.log(np.asarray(drift_per_layer, dtype=np.float64))
    depth_L = np.arange(len(log_L)) / len(log_L)

    # Between two layers the error is smooth in mu, across one it has a corner: eight points a gap, then ever closer.
    step = 1 / (8 * len(log_L))
    mu = _best_mu(depth_L, log_L, np.arange(8 * len(log_L) + 1) * step)
    while step > 1e-9:
        mu = _best_mu(depth_L, log_L, np.clip(mu + step * np.linspace(-1, 1, 21), 0, 1))
        step /= 10
    _, level, start, end = _solve(depth_L, log_L, mu)
    peak = math.exp(min(level, 0.0))
    # A steep side may reach less than the smallest float at an end that no layer is at.
    return BudgetCurve(mu, *(max(peak * math.exp(fall), sys.float_info.min) for fall in (start, 0.0, end)))


def _best_mu(depth_L: Array, log_L: Array, candidates: Array) -> float:
    return float(min(candidates, key=lambda mu: _solve(depth_L, log_L, float(mu))[0]))


def _solve(depth_L: Array, log_L: Array, mu: float) -> tuple[float, float, float, float]:
    """With the peak at ``mu``: squared error, log of the peak, logs of start and end over the peak (0 or less)."""
    sides = []
    for side, at_L, width in ((0, depth_L < mu, mu), (1, depth_L > mu, 1 - mu)):
        if at_L.sum() >= 2:
            sides.append((side, np.where(at_L, ((depth_L - mu) / width) ** 2, 0.0)))
    best = (math.inf, 0.0, 0.0, 0.0)
    # Logs above 0 make a valley of a side. The best without one is the free solution of some of the sides.
    for kept in (chosen for size in range(len(sides), -1, -1) for chosen in combinations(sides, size)):
        matrix = np.stack([np.ones_like(log_L), *(column for _, column in kept)], axis=1)
        solved = np.linalg.lstsq(matrix, log_L, rcond=None)[0]
        error, falls = float(((matrix @ solved - log_L) ** 2).sum()), [0.0, 0.0]
        for (side, _), fall in zip(kept, solved[1:]):
            falls[side] = float(fall)
        if max(falls) <= 0 and error < best[0]:
            best = (error, float(solved[0]), falls[0], falls[1])
    return best
