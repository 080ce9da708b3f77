"""Noise: which positions of a canvas become MASK, and what each then weighs in the loss.

B rows, N positions. A row is [prompt | answer | end-of-text fill]:

    0 ........ prompt ........ end ........ see ........ N
    | prompt   | answer        | fill       | not there  |

`end` is the place of the first end-of-text. Positions at or past `see` are not attended to and not in the loss. The
*answer region* is [prompt, see); the prompt is never masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.train.config import NoiseConfig

GOLDEN = 0.6180339887498949


class Rows(NamedTuple):
    """Clean rows: `token_BN` int, `prompt_B`, `end_B`, `see_B` int."""

    token_BN: Tensor
    prompt_B: Tensor
    end_B: Tensor
    see_B: Tensor


class Noised(NamedTuple):
    """`token_BN` with MASK put in; `masked_BN` bool, to be predicted; `weight_BN` fp32, 0 where the loss does not look;
    `tail_BN` bool, masked because they lie behind a noisy block."""

    token_BN: Tensor
    masked_BN: Tensor
    weight_BN: Tensor
    tail_BN: Tensor


class Plan(NamedTuple):
    """`rate_BN`: probability of being masked; `weight_BN`: weight if masked; `tail_BN`: behind a noisy block."""

    rate_BN: Tensor
    weight_BN: Tensor
    tail_BN: Tensor


def answer_region(rows: Rows) -> Tensor:
    """bool [B, N]: the positions [prompt, see)."""
    pos_N = torch.arange(rows.token_BN.shape[1], device=rows.token_BN.device)
    return (pos_N >= rows.prompt_B[:, None]) & (pos_N < rows.see_B[:, None])


def loss_region(rows: Rows, loss_on_fill: bool) -> Tensor:
    """bool [B, N]: the answer region; without the fill, [prompt, end]."""
    region_BN = answer_region(rows)
    if loss_on_fill:
        return region_BN
    pos_N = torch.arange(rows.token_BN.shape[1], device=rows.token_BN.device)
    return region_BN & (pos_N <= rows.end_B[:, None])


def spread_rates(num_rows: int, offset: Tensor, min_rate: float, power: float = 1.0) -> Tensor:
    """Mask rates [B]: u ** power mapped to [min_rate, 1], of u that cover (0, 1) evenly, u_i = (offset + i/B) mod 1.

    Each of B equal strata holds one u, so the batch's loss varies less than with independent draws.
    """
    step_B = torch.arange(num_rows, device=offset.device, dtype=offset.dtype) / num_rows
    return min_rate + (1 - min_rate) * ((offset + step_B) % 1) ** power


def spread_kinds(num_rows: int, offset: Tensor, *shares: float) -> list[Tensor]:
    """bool [B] a share: the rows of each kind. A golden-ratio walk, so that all kinds meet all rates."""
    index_B = torch.arange(num_rows, device=offset.device, dtype=offset.dtype)
    walk_B, kinds, first = (offset + index_B * GOLDEN) % 1, [], 0.0
    for share in shares:
        kinds.append((walk_B >= first) & (walk_B < first + share))
        first += share
    return kinds


def uniform_plan(rows: Rows, rate_B: Tensor) -> Plan:
    """Every position of the answer region with probability t, weight 1/t."""
    rate_BN = rate_B[:, None].expand(rows.token_BN.shape)
    return Plan(rate_BN, 1 / rate_BN, torch.zeros_like(rate_BN, dtype=torch.bool))


def block_plan(rows: Rows, rate_B: Tensor, length_B: Tensor, block_B: Tensor, tail_weight: float) -> Plan:
    """Blocks before `block_B` clean, that block with rate t and weight 1/t, all behind it masked, weight tail_weight.

    Blocks of `length_B` positions are counted from the answer's start.
    """
    pos_N = torch.arange(rows.token_BN.shape[1], device=rows.token_BN.device)
    place_BN = torch.div(pos_N - rows.prompt_B[:, None], length_B[:, None], rounding_mode="floor")
    before, inside = place_BN < block_B[:, None], place_BN == block_B[:, None]
    rate_BN = torch.where(inside, rate_B[:, None], 1.0).masked_fill(before, 0.0)
    weight_BN = torch.where(inside, 1 / rate_B[:, None], tail_weight).masked_fill(before, 0.0)
    return Plan(rate_BN, weight_BN, ~(before | inside))


def numbers_plan(rows: Rows, rate_B: Tensor, draw_B: Tensor, is_digit_V: Tensor) -> Plan:
    """Clean up to a place in the answer; behind it all digits masked, and the rest with rate t and weight 1/t.

    So stands a canvas after a few passes: the words are decided wherever they stand, and the numbers wait for each
    other, from left to right. In uniform noise a number is mostly to be read off another place.
    """
    pos_N = torch.arange(rows.token_BN.shape[1], device=rows.token_BN.device)
    cut_B = rows.prompt_B + (draw_B * (rows.end_B + 1 - rows.prompt_B)).long()
    rate_BN = torch.where(is_digit_V[rows.token_BN], 1.0, rate_B[:, None])
    before_BN = pos_N < cut_B[:, None]
    weight_BN = (1 / rate_BN).masked_fill(before_BN, 0.0)
    return Plan(rate_BN.masked_fill(before_BN, 0.0), weight_BN, torch.zeros_like(before_BN))


def draw_blocks(rows: Rows, lengths: tuple[int, ...], draw_B2: Tensor) -> tuple[Tensor, Tensor]:
    """Block length and block index [B], from uniform draws [B, 2].

    The index is one of the blocks up to the one with the first end-of-text: decoding stops there, so a later block
    never has clean blocks before it.
    """
    # filled on the device: a copy from the host would wait for the steps before
    length_K = torch.cat([torch.full((1,), length, device=draw_B2.device) for length in lengths])
    length_B = length_K[(draw_B2[:, 0] * len(lengths)).long().clamp_max(len(lengths) - 1)]
    num_B = torch.div(rows.end_B - rows.prompt_B, length_B, rounding_mode="floor") + 1
    return length_B, torch.minimum((draw_B2[:, 1] * num_B).long(), num_B - 1)


def apply_plan(rows: Rows, plan: Plan, draw_BN: Tensor, mask_id: int, loss_on_fill: bool) -> Noised:
    """Mask the positions of the answer region whose uniform draw lies under their rate."""
    masked_BN = (draw_BN < plan.rate_BN) & answer_region(rows)
    counts_BN = masked_BN & loss_region(rows, loss_on_fill)
    weight_BN = torch.where(counts_BN, plan.weight_BN, 0.0).float()
    return Noised(rows.token_BN.masked_fill(masked_BN, mask_id), masked_BN, weight_BN, masked_BN & plan.tail_BN)


def reach(rows: Rows, masks: Mapping[str, float]) -> Tensor:
    """int [B]: what every row sees, the visible positions; of causal masks the prompt."""
    return rows.prompt_B if "causal" in masks else rows.see_B


def unmasked(rows: Rows, loss_on_fill: bool) -> Noised:
    """Nothing masked, and everything of the loss region to be predicted: for networks that see no later position."""
    region_BN = loss_region(rows, loss_on_fill)
    return Noised(rows.token_BN, region_BN, region_BN.float(), torch.zeros_like(region_BN))


def noise(
    rows: Rows,
    masks: Mapping[str, float],
    config: NoiseConfig,
    mask_id: int,
    generator: torch.Generator,
    rate_B: Tensor | None = None,
    *,
    power: float = 1.0,
    is_digit_V: Tensor | None = None,
) -> Noised:
    """Noise for training; with ``rate_B``, at these rates instead of spread ones. Masks of numbers need
    ``is_digit_V``."""
    if "causal" in masks:
        return unmasked(rows, config.loss_on_fill)
    num_rows, device = len(rows.prompt_B), rows.token_BN.device
    offset_2 = torch.rand(2, device=device, generator=generator)
    draw_B2 = torch.rand(num_rows, 2, device=device, generator=generator)
    draw_BN = torch.rand(rows.token_BN.shape, device=device, generator=generator)
    if rate_B is None:
        rate_B = spread_rates(num_rows, offset_2[0], config.min_rate, power)
    is_block_B, is_numbers_B = spread_kinds(num_rows, offset_2[1], masks.get("block", 0.0), masks.get("numbers", 0.0))
    length_B, block_B = draw_blocks(rows, config.block_lengths, draw_B2)
    plan = uniform_plan(rows, rate_B)
    plan = _where(is_block_B, block_plan(rows, rate_B, length_B, block_B, config.tail_weight), plan)
    if is_digit_V is not None:
        plan = _where(is_numbers_B, numbers_plan(rows, rate_B, draw_B2[:, 0], is_digit_V), plan)
    return apply_plan(rows, plan, draw_BN, mask_id, config.loss_on_fill)


def _where(rows_B: Tensor, chosen: Plan, other: Plan) -> Plan:
    return Plan(*(torch.where(rows_B[:, None], a, b) for a, b in zip(chosen, other)))
