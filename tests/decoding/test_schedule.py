"""Fixed schedules: commits of each pass, with and without a first pass that decides one position only."""

from __future__ import annotations

import pytest

from unmask.decoding.schedule import fills, quotas, time_ratio
from unmask.errors import ConfigError, EngineError

EPS = 1e-3
# Commits per forward that Fast-dLLM's block caches gave on Dream, prefix and dual alike (NVlabs/Fast-dLLM@24cc59e,
# dream/model/generation_utils_block.py), forwards without a commit included: (masks per block, steps, commits).
REFERENCE = [
    ([8, 8, 8], 24, [1, 0, 1, 1, 1, 1, 1, 2] * 3),
    ([12, 12], 12, [1, 2, 2, 2, 2, 3] * 2),
]


@pytest.mark.parametrize(("masks", "steps", "commits"), REFERENCE)
def test_a_led_schedule_is_the_references(masks: list[int], steps: int, commits: list[int]) -> None:
    assert quotas(masks, steps, "dream", EPS, lead=True) == [count for count in commits if count]


def test_a_led_curve_is_another_one() -> None:
    """t = 1, .75, .5, .25 and shares just under 1/3 and 1/2 of what is left; the reference's cases do not tell."""
    assert quotas([12, 12], 8, "dream", EPS, lead=True) == [1, 3, 3, 5] * 2
    assert quotas([12, 12], 8, "dream", EPS) == [2, 3, 3, 4] * 2


@pytest.mark.parametrize("kind", ["even", "dream"])
@pytest.mark.parametrize("steps", [8, 9, 13, 16, 40])
def test_a_led_schedule_decides_everything_and_one_first(kind: str, steps: int) -> None:
    masks = [8, 1, 5, 2]
    given, start = quotas(masks, steps, kind, EPS, lead=True), 0
    assert sum(given) == sum(masks)
    assert min(given) > 0
    assert len(given) <= steps
    for block in masks:  # each block's own passes, the first of which decides one
        assert given[start] == 1
        left = block
        while left > 0:
            left -= given[start]
            start += 1
        assert left == 0
    assert start == len(given)


def test_an_even_led_schedule_spreads_the_rest() -> None:
    assert quotas([8], 4, "even", EPS, lead=True) == [1, 3, 2, 2]
    assert quotas([8], 4, "even", EPS) == [2, 2, 2, 2]
    assert quotas([8, 8], 8, "even", EPS, lead=True) == [1, 3, 2, 2] * 2
    assert quotas([1, 1], 2, "even", EPS, lead=True) == [1, 1]
    assert quotas([2], 5, "even", EPS, lead=True) == [1, 1]


@pytest.mark.parametrize("kind", ["even", "dream"])
def test_one_step_is_too_few_for_a_led_block(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"steps=3 leaves 1 step to a block of 8 .* needs 2: .* at least 4 steps"):
        quotas([8, 8], 3, kind, EPS, lead=True)
    assert sum(quotas([8, 8], 4, kind, EPS, lead=True)) == 16
    assert quotas([8, 8], 2, kind, EPS) == [8, 8]  # nothing leads: one step decides a block
    assert quotas([8, 1], 3, kind, EPS, lead=True) == [1, 7, 1]  # a single mask needs no second step


@pytest.mark.parametrize("lead", [False, True])
def test_fewer_steps_than_blocks(lead: bool) -> None:
    with pytest.raises(ConfigError, match=r"steps=2 is less than the 3 blocks"):
        quotas([4, 4, 4], 2, "even", EPS, lead)
    with pytest.raises(ConfigError, match=r"steps=2 is less than the 3 blocks"):
        fills(3, 2, EPS)


def test_an_unresolved_schedule_is_no_schedule() -> None:
    with pytest.raises(EngineError, match="family"):
        quotas([4], 4, "family", EPS)


def test_every_block_has_its_own_grid() -> None:
    assert fills(1, 5, EPS) == time_ratio(5, EPS)
    assert fills(2, 5, EPS) == time_ratio(3, EPS) + time_ratio(2, EPS)
    assert fills(4, 9, EPS).count(1.0) == 4  # a block is done where its grid ends
