"""Loads that fill every bucket of seats, in short: on a CPU the steps of fixed shape are launched as they are. The long
form, captured, is a part of `scripts/soak captured`."""

from __future__ import annotations

import pytest
import torch

from unmask.bench.buckets import BUCKETS, FILLED, fill, requests
from unmask.core.canvas import Canvas
from unmask.eval.continuous import Way

FIXED = Way(fixed=True)


@pytest.mark.parametrize(("method", "network"), [FILLED[2], FILLED[5]])
def test_buckets_are_full_and_answers_those_of_requests_alone(method: str, network: str) -> None:
    found = fill(method, network, FIXED, (2, 16))
    assert found.full
    assert found.num_replays[16] > 2
    assert found.num_different == 0


def test_a_seat_beyond_the_first_eight_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: no smaller load shows it."""
    first = Canvas.first

    def careless(self: Canvas, num_seats: int) -> Canvas:
        canvas = first(self, num_seats)
        if num_seats > 8:
            canvas.pass_S = torch.cat((canvas.pass_S[:8], canvas.pass_S[:8].clone()))
        return canvas

    monkeypatch.setattr(Canvas, "first", careless)
    found = fill("confidence", "llada", FIXED, (8, 16))
    assert found.different[8] == []
    assert found.different[16] != []


def test_what_is_never_captured_is_said() -> None:
    found = fill("elastic-cache", "llada", FIXED, (1,))
    assert not found.captured
    assert not found.full


def test_requests_are_short_and_fit_their_pages() -> None:
    for method, _ in FILLED:
        assert max(len(each.prompt) + each.params.max_tokens for each in requests(method)) <= 32
    assert max(BUCKETS) == 64
