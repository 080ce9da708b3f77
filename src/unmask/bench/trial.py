"""One operation at one size: is it right, how long does it take, how far is that from the floor, and what beats what.

A speed-up stands in a result only if the operation was right in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unmask.bench.checking import within
from unmask.bench.floor import Ceilings, Cost
from unmask.bench.timing import peak_bytes, seconds_a_call

Call = Callable[[int], Any]
"""The operation once; the number says on which of the rotating tensors."""


@dataclass(frozen=True)
class Trial:
    """What is measured of one case. Its tensors live as long as it does."""

    errors: Callable[[], dict[str, float]]
    """Relative errors of the operation against fp64, by output."""
    bound: float | Mapping[str, float]
    cost: Cost = field(default_factory=Cost)
    ours: Call | None = None
    """None: checked only."""
    others: Mapping[str, Call] = field(default_factory=dict)
    """The same work done otherwise: our time is compared with theirs."""
    parts: Mapping[str, Call] = field(default_factory=dict)
    """Less work, timed for the record: no speed-up is told."""
    num_calls: int = 1
    memory: bool = False
    """Whether the most extra memory is measured."""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """An operation at a size. ``make`` builds its tensors."""

    op: str
    shape: Mapping[str, Any]
    make: Callable[[], Trial]

    @property
    def name(self) -> str:
        return f"{self.op}: " + ", ".join(f"{key} {value}" for key, value in self.shape.items())


def check(case: Case, trial: Trial) -> dict[str, Any]:
    """A row that says whether the operation is right."""
    errors = trial.errors()
    return {"op": case.op, **case.shape, "ok": within(errors, trial.bound), "errors": errors, **trial.facts}


def measure(
    case: Case, trial: Trial, device: torch.device | str, ceilings: Ceilings, *, trusted: bool
) -> dict[str, Any]:
    """A row with times and floor; with speed-ups if the operation is right here and ``trusted`` from other checks."""
    assert trial.ours is not None
    row = check(case, trial)
    right = row["ok"] and trusted
    seconds, floor = seconds_a_call(trial.ours, trial.num_calls, device), trial.cost.seconds(ceilings)
    row |= {
        "bytes": trial.cost.num_bytes,
        "flops": trial.cost.num_flops,
        "bound_by": trial.cost.bound_by(ceilings),
        "floor_us": 1e6 * floor,
        "us": 1e6 * seconds,
        "over_floor": seconds / floor,
    }
    if trial.memory:
        peak = peak_bytes(lambda: trial.ours and trial.ours(0), device)
        row["extra_MB"] = None if peak is None else peak / 1e6
    took = {name: seconds_a_call(call, trial.num_calls, device) for name, call in trial.others.items()}
    row["others_us"] = {name: 1e6 * each for name, each in took.items()}
    row["parts_us"] = {name: 1e6 * seconds_a_call(call, trial.num_calls, device) for name, call in trial.parts.items()}
    row["speedup"] = {name: each / seconds for name, each in took.items()} if right else {}
    return row
