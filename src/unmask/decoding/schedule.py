"""Fixed schedules: how many tokens each pass commits, worked out when a request is admitted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unmask.errors import ConfigError, EngineError


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


def dream(masks: int, steps: int, eps: float, start: int = 0) -> list[int]:
    """Dream: step i decides int(remaining * share); the last one takes all that is left. Steps before ``start`` are
    over."""
    quotas, left = [], masks
    for share in time_ratio(steps, eps)[start:]:
        quota = left if share == 1.0 else int(torch.tensor(float(left)) * torch.tensor(share))
        quotas.append(quota)
        left -= quota
    return quotas


def quotas(masks_per_block: Sequence[int], steps: int, kind: str, eps: float, lead: bool = False) -> list[int]:
    """Commits of each pass over the whole canvas. Steps that would commit nothing are not run, hence not listed.

    ``kind`` is "even" or "dream". With ``lead`` the first pass of each block decides one position only; it counts as
    the first step of that block's schedule (spec: Fast-dLLM's block caches for Dream).

    Raises:
        ConfigError: fewer steps than blocks, or with ``lead`` a single step for a block of several masks.
    """
    out: list[int] = []
    for masks, block_steps in zip(masks_per_block, steps_per_block(steps, len(masks_per_block))):
        if lead and block_steps < 2 <= masks:
            raise ConfigError(
                f"steps={steps} leaves 1 step to a block of {masks} undecided positions and it needs 2: its first pass "
                "decides only its first position, which is scored by the row before the block; "
                f"use at least {2 * len(masks_per_block)} steps, or a longer block_length"
            )
        out += _of_block(masks, block_steps, kind, eps, lead)
    return [quota for quota in out if quota]


def _of_block(masks: int, steps: int, kind: str, eps: float, lead: bool) -> list[int]:
    """Commits of each step of one block."""
    first = [1] if lead else []
    left, over = masks - len(first), len(first)
    if kind == "dream":
        return first + dream(left, steps, eps, start=over)
    if kind == "even":
        return first + (even(left, steps - over) if steps > over else [])
    raise EngineError(f"schedule {kind!r} is neither 'even' nor 'dream'; please report")


def fills(num_blocks: int, steps: int, eps: float) -> list[float]:
    """Chance of a candidate in each pass (Dream's `origin`): every block has a time grid of its own.

    A block that chance decides early leaves the rest of its grid to the next one: each grid ends with 1, so there are
    enough of them.

    Raises:
        ConfigError: fewer steps than blocks.
    """
    return [share for part in steps_per_block(steps, num_blocks) for share in time_ratio(part, eps)]
