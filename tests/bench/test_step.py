"""The benchmark of the captured step, as far as a CPU can run it: its scenario, and the compiled parts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from unmask.bench.step import KINDS, Kind, _NoNetwork, admit, build, check_replay, random_model
from unmask.cache.policy import Recompute
from unmask.decoding.frontier import Blocks
from unmask.decoding.params import Needs
from unmask.engine.graphs import CapturedStep, Readback
from unmask.engine.step import READBACK, Budgets
from unmask.errors import ConfigError


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_compiled_parts_are_whole_graphs_and_change_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end and others take their seats; every part traces as one graph. Code generation is left out: it is
    the slow part, and on a GPU the benchmark itself compares it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = check_replay(kind, random_model(2, 64, 256, torch.float32, "cpu"), 14, capture=False, compiled=True)
    assert found["equal"], found["differences"]
    assert found["seat_steps_finished"] > 14  # the empty seat counts once a step; others were finished, too
    assert (found["drafts_accepted"] > 0) == (kind.drafter().num_scratch > 0)
    torch._dynamo.reset()


def test_a_difference_is_found() -> None:
    """Negative control: a second run with other thresholds is not equal."""

    class Hasty(Blocks):
        runs = 0

        def advance(self, canvas: Any, params: Any) -> Any:
            Hasty.runs += 1
            if Hasty.runs > 14:
                params.threshold_S.fill_(0.0)
            return super().advance(canvas, params)

    kind = Kind("hasty", Hasty, Recompute)
    found = check_replay(kind, random_model(2, 64, 256, torch.float32, "cpu"), 14, capture=False)
    assert not found["equal"]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_step_without_its_network_runs(kind: Kind) -> None:
    """What the times of the rules alone are measured with; the count of rows is the plan's."""
    model = random_model(2, 64, 256, torch.float32, "cpu")
    rules = build(kind, model, 2, 80, Budgets(80, 80), Needs(), _NoNetwork)
    for seat in range(2):
        admit(rules, seat, seat, 17, 48)
    with torch.inference_mode():
        rules()
    assert (rules.readback[:, READBACK.index("num_rows")] > 0).all()


def test_readback_is_one_step_late() -> None:
    source = torch.zeros(2, 8, dtype=torch.int32)
    readback = Readback(source)
    seen = []
    for number in range(4):
        source.fill_(number)
        readback.send()
        message = readback.receive()
        seen.append(None if message is None else int(message[0, 0]))
    assert seen == [None, 0, 1, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_capturing_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        CapturedStep(lambda: None)
