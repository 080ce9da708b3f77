"""Fixed schedules: how many tokens each pass commits, worked out when a request is admitted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unmask.errors import ConfigError


def spread(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` near-equal parts; the first ones take the remainder (LLaDA's rule)."""
    base, extra = divmod(total, parts)
    return [base + (part < extra) for part in range(parts)]


def steps_per_block(steps: int, num_blocks: int) -> list[int]:
    """Steps of each block.

    Raises:
        ConfigError: fewer steps than blocks, which would leave a block without a pass.
    """
    if steps < num_blocks:
        raise ConfigError(
            f"steps={steps} is less than the {num_blocks} blocks of this canvas, and each needs a pass; "
            f"use at least {num_blocks} steps, or a longer block_length"
        )
    return spread(steps, num_blocks)


def even(masks: int, steps: int) -> list[int]:
    """LLaDA: masks spread evenly over the steps."""
    return spread(masks, steps)


def time_ratio(steps: int, eps: float) -> list[float]:
    """Share of the remaining masks that each step decides: 1 - t[i+1] / t[i] over t = linspace(1, eps), last 1.

    In float32, as the reference computes it (spec: Dream's `diffusion_generate`), since the counts are truncated.
    """
    t = torch.linspace(1, eps, steps + 1)
    return [*(1 - t[1:-1] / t[:-2]).tolist(), 1.0]


def dream(masks: int, steps: int, eps: float) -> list[int]:
    """Dream: step i decides int(remaining * share); the last one takes all that is left."""
    quotas, left = [], masks
    for share in time_ratio(steps, eps):
        quota = left if share == 1.0 else int(torch.tensor(float(left)) * torch.tensor(share))
        quotas.append(quota)
        left -= quota
    return quotas


def quotas(masks_per_block: Sequence[int], steps: int, kind: str, eps: float) -> list[int]:
    """Commits of each pass over the whole canvas. Steps that would commit nothing are not run, hence not listed."""
    out: list[int] = []
    for masks, block_steps in zip(masks_per_block, steps_per_block(steps, len(masks_per_block))):
        out += dream(masks, block_steps, eps) if kind == "dream" else even(masks, block_steps)
    return [quota for quota in out if quota]
