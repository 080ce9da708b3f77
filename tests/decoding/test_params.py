"""Requests as device tensors: what is said arrives, what is not said is neutral."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unmask.config import SamplingParams
from unmask.decoding.params import NO_LIMIT, DecodeParams, SeatParams, seat_params
from unmask.errors import ConfigError

EOS = (61, 62)


def seat(masks: tuple[int, ...] = (8, 8), kind: str = "even", lead: bool = False, **said: Any) -> SeatParams:
    params = SamplingParams(**said)
    return seat_params(params, kind=kind, masks_per_block=masks, model_eos=EOS, seed=1, lead=lead)


# field and value of the request: field and value of the seat, the neutral value
MEANINGS = [
    ("strict_threshold", True, "strict", True, False),
    ("tau_add", 0.0, "tau_add", 0.0, 0.1),
    ("tau_act", 0.5, "tau_act", 0.5, 0.95),
    ("pipeline_depth", 3, "depth", 3, NO_LIMIT),
    ("early_stop", False, "drains", True, False),
    ("refresh_window", 48, "refresh", 48, NO_LIMIT),
    ("track", 0, "track", 0, NO_LIMIT),
    ("refresh_interval", 7, "interval", 7, 0),
    ("search", 5, "search", 5, NO_LIMIT),
    ("gamma", 0.0, "gamma", 0.0, 0.8),
    ("accept", "product", "product", True, False),
    ("isolation", "reference", "isolated", False, True),
]


@pytest.mark.parametrize(("field", "value", "name", "expected", "neutral"), MEANINGS)
def test_what_is_said_arrives_on_the_device(field: str, value: Any, name: str, expected: Any, neutral: Any) -> None:
    plain, said = seat(threshold=0.9), seat(threshold=0.9, **{field: value})
    assert getattr(plain, name) == neutral
    assert dataclasses.replace(plain, **{name: expected}) == said  # this and nothing else
    params = DecodeParams(2, 4, "cpu")
    params.write(0, plain)
    params.write(1, said)
    neutral_S, expected_S = getattr(params, f"{name}_S").tolist()
    assert (neutral_S, expected_S) == (pytest.approx(neutral), pytest.approx(expected))


@pytest.mark.parametrize("said", [{"early_stop": True}, {"strict_threshold": False}, {"isolation": "strict"}])
def test_saying_what_holds_anyway_changes_nothing(said: dict[str, Any]) -> None:
    assert seat(threshold=0.9, **said) == seat(threshold=0.9)


def test_tables_of_a_kind() -> None:
    params = DecodeParams(1, 1, "cpu")
    for name in ("refresh", "track", "interval", "search", "depth", "window"):
        assert getattr(params, f"{name}_S").dtype == torch.int32
    for name in ("product", "isolated", "drains", "strict"):
        assert getattr(params, f"{name}_S").dtype == torch.bool


def test_a_seat_that_drains_has_no_end() -> None:
    params = DecodeParams(3, 4, "cpu")
    params.write(0, seat(threshold=0.9, early_stop=False))
    params.write(1, seat(threshold=0.9))
    assert params.stops_SE[0].tolist() == [-1] * 8
    assert params.stops_SE[1].tolist() == params.eos_SE[1].tolist() == [61, 62, -1, -1, -1, -1, -1, -1]
    assert params.eos_SE[0, :2].tolist() == [61, 62]  # it still ends the answer
    grown = params.grown(4, 8)
    assert grown.drains_S.tolist() == [True, False, False, False]
    assert (grown.stops_SE[0] == -1).all()


def test_a_leading_position_has_a_pass_of_its_own() -> None:
    assert seat(steps=8, lead=True).quota == [1, 3, 2, 2] * 2
    assert seat(steps=8).quota == [2] * 8
    assert seat(threshold=0.9, lead=True).quota == ()
    with pytest.raises(ConfigError, match="steps=2 leaves 1 step to a block of 8"):
        seat(steps=2, lead=True)


def test_unsaid_steps_are_enough_for_leading_positions() -> None:
    """One step a mask, spread over the blocks, would leave one to the last block."""
    assert sum(seat((1, 1, 1, 3), lead=True).quota) == 6
    with pytest.raises(ConfigError, match="steps=6 leaves 1 step to a block of 3"):
        seat((1, 1, 1, 3), lead=True, steps=6)


def test_chance_and_a_leading_position_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="origin"):
        seat(kind="dream", lead=True, alg="origin", steps=8)
    assert len(seat(kind="dream", alg="origin", steps=9).fill) == 9


def test_a_schedule_that_the_window_cannot_hold() -> None:
    with pytest.raises(ConfigError, match=r"steps=2 would commit 8 positions .* decode_window=4 .* at least 8"):
        seat((16,), steps=2, decode_window=4)
    assert seat((16,), steps=2, decode_window=8).quota == [8, 8]
    assert seat((16,), threshold=0.9, decode_window=4).window == 4


class Counting(TorchDispatchMode):
    """Operations that change memory, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("_") or name in ("_to_copy", "full", "zeros"):
            self.names.append(name)
        return func(*args, **kwargs or {})


def test_a_seat_is_taken_in_few_operations() -> None:
    """On a GPU each is a launch; there were 40. What is neutral already is not written again."""
    params = DecodeParams(4, 16, "cpu")
    plain = seat(threshold=0.9)
    params.write(1, plain)
    with Counting() as counting:
        params.write(2, plain)
    assert len(counting.names) <= 8
    before = {name: value.clone() for name, value in vars(params).items() if isinstance(value, torch.Tensor)}
    params.write(2, dataclasses.replace(seat(steps=8), ban_argmax=(5, 6)))
    changed = {name for name, value in before.items() if not torch.equal(value, getattr(params, name))}
    assert {"quota_ST", "ban_argmax_SB", "capped_S"} <= changed
    params.write(2, plain)
    assert all(torch.equal(value, getattr(params, name)) for name, value in before.items())


def test_needs_are_those_of_who_is_there() -> None:
    params = DecodeParams(3, 16, "cpu")
    params.write(0, seat(threshold=0.9))
    params.write(1, seat(temperature=0.5))
    params.write(2, seat(temperature=0.5))
    assert params.needs.sampled
    params.release(1)
    assert params.needs.sampled
    params.release(2)
    assert params.needs == seat(threshold=0.9).needs
    grown = params.grown(5, 16)
    grown.write(4, seat(temperature=0.5))
    assert grown.needs.sampled
    assert not params.needs.sampled
