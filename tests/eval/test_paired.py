"""Paired differences and areas under curves, beside values that were worked out by hand."""

from __future__ import annotations

import random

import pytest

from unmask.eval.paired import at_accuracy, aup, paired_difference


def test_a_difference_by_hand() -> None:
    """Ten problems, three that only we have right and one that only they have: over 12, with one more of each, the mean
    is 2/12 and the variance 6/12 - 1/36."""
    ours = [1, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    theirs = [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]
    found = paired_difference(ours, theirs)
    assert found.difference == pytest.approx(0.2)
    assert (found.num_better, found.num_worse) == (3, 1)
    assert (found.low, found.high) == pytest.approx((-0.222137, 0.555471), abs=1e-6)
    turned = paired_difference(theirs, ours)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))


def test_no_difference_is_no_certainty() -> None:
    """98 equal answers: variance 2/100, so 1.96 sqrt(.02 / 100) to each side."""
    found = paired_difference([1] * 98, [1] * 98)
    assert (found.difference, found.num_better, found.num_worse) == (0, 0, 0)
    assert (found.low, found.high) == pytest.approx((-0.0277181, 0.0277181), abs=1e-6)


def test_requests_of_two_problems_by_hand() -> None:
    """Shares .5 and 0, and a problem of each kind: mean .125, variance .1875 - .015625, four requests."""
    found = paired_difference([2, 1], [1, 1], per_request=2)
    assert found.difference == pytest.approx(0.25)
    assert (found.low, found.high) == pytest.approx((-0.2812792, 0.5312792), abs=1e-6)


def test_an_interval_stays_among_accuracies() -> None:
    assert paired_difference([1, 1], [0, 0]).high == 1.0
    assert paired_difference([0], [1]).low == -1.0


@pytest.mark.parametrize("per_request", [1, 4])
def test_it_covers_what_it_says(per_request: int) -> None:
    """Of 1,000 runs over 150 requests, whose problems share their luck, 95% cover the true difference of .03."""
    draw = random.Random(0)

    def request() -> tuple[int, int]:
        hard = draw.random() < 0.3
        pairs = []
        for _ in range(per_request):
            luck = draw.random()
            pairs.append((luck < (0.8 if hard else 0.96), luck < (0.7 if hard else 0.96)))
        return sum(ours for ours, _ in pairs), sum(theirs for _, theirs in pairs)

    covered = 0
    for _ in range(1000):
        ours, theirs = zip(*(request() for _ in range(150)))
        found = paired_difference(ours, theirs, per_request)
        covered += found.low <= 0.03 <= found.high
    assert 935 <= covered <= 990


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1], [1, 0])])
def test_pairs_must_be_pairs(ours: list[int], theirs: list[int]) -> None:
    with pytest.raises(ValueError, match="needs the same"):
        paired_difference(ours, theirs)


@pytest.mark.parametrize(
    ("points", "best", "area"),
    [
        ([(3.0, 80.0)], 90.0, 240.0),  # the first in full, whatever the best is
        ([(1.0, 80.0), (2.0, 80.0)], 80.0, 160.0),
        ([(2.0, 80.0), (1.0, 80.0)], 80.0, 160.0),  # in any order
        # 90 exp(-.3) = 66.67364 and 88 exp(-.36) = 61.39552; 70 is more than 5 under 90
        ([(2.0, 90.0), (4.0, 88.0), (8.0, 70.0)], 100.0, 180.0 + 66.67364 + 61.39552),
        ([(2.0, 90.0), (4.0, 85.0)], 90.0, 180.0 + 90.0 + 71.95095),  # 5 under is kept: 85 exp(-1/6)
        ([(1.0, 50.0), (2.0, 60.0)], 40.0, 105.0),  # better than the best counts in full
        ([(1.0, 0.0), (4.0, 0.0)], 0.0, 0.0),
        ([(1.0, 70.0), (1.0, 90.0), (2.0, 90.0)], 90.0, 180.0),  # of equal speed, the better one is first
    ],
)
def test_aup_by_hand(points: list[tuple[float, float]], best: float, area: float) -> None:
    assert aup(points, best) == pytest.approx(area, abs=1e-4)


def test_aup_of_nothing() -> None:
    with pytest.raises(ValueError, match="one point"):
        aup([], 90.0)


def test_gain_is_over_the_plain_rule_at_the_same_accuracy() -> None:
    curve = [(0.9, 4.0), (0.8, 6.0), (0.95, 2.0), (0.85, 1.0)]
    assert at_accuracy(curve, 0.96) is None
    assert at_accuracy(curve, 0.95) == 2.0
    assert at_accuracy(curve, 0.9) == 4.0
    assert at_accuracy(curve, 0.925) == pytest.approx(3.0)
    assert at_accuracy(curve, 0.1) == 6.0
