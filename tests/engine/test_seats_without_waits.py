"""A seat is given and taken back behind what the device has been told, so that nobody's pass waits for it.

On a GPU ``tensor[i] = number`` makes a tensor of the host and waits for its copy. `scripts/soak captured` counts such
waits on a GPU, whatever their cause; here that one cause is looked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unmask import SamplingParams
from unmask.engine.engine import Engine
from unmask.eval.continuous import engine


class NumbersSet(TorchFunctionMode):
    """Counts numbers that are set by index."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            self.count += 1
        return func(*args, **(kwargs or {}))


def served(method: str, **said: Any) -> int:
    """Numbers set by index while requests join, leave and share a prompt's K/V."""
    llm = engine(method, "llada", 3)
    params = [SamplingParams(max_tokens=8, seed=3, **said, **more) for more in ({}, {}, {"top_k": 2})]
    prompt = {"prompt_token_ids": [*range(20), 3]}
    with NumbersSet() as watch:
        llm.generate([prompt] * 6, params * 2)
    return watch.count


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("flash-cache", {}),
        ("fast-dllm-prefix", {}),
        ("d2f", {}),
        ("one-pass-cache", {}),
        ("spa-cache", {}),
        ("confidence", {"cfg_scale": 1.0}),
        ("vanilla", {"steps": 4}),
    ],
)
def test_no_number_is_set_by_index(method: str, said: dict[str, Any]) -> None:
    assert served(method, **said) == 0


def test_control_a_number_set_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Engine._free

    def careless(self: Engine, seat: int) -> None:
        free(self, seat)
        self.canvas.rows_S[seat] = 0

    monkeypatch.setattr(Engine, "_free", careless)
    assert served("flash-cache") == 6


def test_control_a_tensor_set_by_index_does_not_count() -> None:
    with NumbersSet() as watch:
        torch.zeros(3)[0] = torch.ones(())
        torch.zeros(3)[1].fill_(2)
    assert watch.count == 0
