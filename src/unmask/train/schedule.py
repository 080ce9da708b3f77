"""The learning rate of a stage, and how far the stage is."""

from __future__ import annotations

from unmask.train.config import StageConfig


def progress(step: int, steps: int, elapsed: float = 0.0, max_seconds: float | None = None) -> float:
    """max(step / steps, elapsed / max_seconds): 0 at the start, the stage ends at 1."""
    by_time = elapsed / max_seconds if max_seconds else 0.0
    return max(step / steps, by_time)


def lr_factor(stage: StageConfig, step: int, done: float) -> float:
    """Factor on the learning rates at the 0-based ``step`` with progress ``done``.

    Rises linearly over `warmup` steps, stays at lr_scale, then falls linearly to 0 over the last `decay_fraction` of
    the progress. Every stage warms up again: the stage before ended at 0.
    """
    rise = min(1.0, (step + 1) / stage.warmup) if stage.warmup else 1.0
    fall = 1.0
    if stage.decay == "linear" and stage.decay_fraction > 0:
        fall = min(1.0, max(0.0, 1.0 - done) / stage.decay_fraction)
    return stage.lr_scale * min(rise, fall)
