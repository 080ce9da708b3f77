"""How many operations a layer that chooses its rows takes beside its products, norms and kernels.

Each is a kernel of its own in a captured pass, 1.6 us on a GPU however small its work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unmask import ops
from unmask.cache.drift import DriftGate
from unmask.config import SamplingParams
from unmask.engine.step import Step
from unmask.eval.continuous import Way, engine

MOST = 16
"""Of either kind. There are 8 beside 11 (dllm-cache) or 10 (spa-cache), and 3 more once a pass."""
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "lift_fresh", "_reshape_alias"}
"""Beside views: these launch nothing."""


class Launches(TorchDispatchMode):
    """Counts what would be launched, by name; a call of `unmask.ops` is one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.ops = Counter[str](), Counter[str]()
        self._inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        out = func(*args, **(kwargs or {}))
        if not (self._inside or name in FREE or (func.is_view and _is_view_of(out, args[0]))):
            self.small[name] += 1
        return out

    def whole(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call as one launch."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.ops[name] += not self._inside
            self._inside += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._inside -= 1

        return counted


def _is_view_of(out: Any, source: Any) -> bool:
    """Not a copy, as casts and reshapes may be."""
    return not isinstance(out, Tensor) or out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    launches = Launches()
    with monkeypatch.context() as patch, launches:
        for name in ops.__all__:
            if name[0].islower() and name not in ("check_kernels", "kernels", "on"):
                patch.setattr(ops, name, launches.whole(name, getattr(ops, name)))
        yield launches


def count(method: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Launches], list[Launches]]:
    """Of each fixed-shape step, and of each gated layer in them but the first."""
    steps, layers = list[Launches](), list[Launches]()
    step, run = Step.__call__, DriftGate.run

    def counted_step(self: Step) -> None:
        with counting(monkeypatch) as launches:
            step(self)
        steps.append(launches)

    def counted_layer(self: DriftGate, layer: Any, x_MD: Tensor) -> Tensor:
        if layer.index == 0 or self.plan.per_seat is None:
            return run(self, layer, x_MD)
        with counting(monkeypatch) as launches:
            out_MD = run(self, layer, x_MD)
        layers.append(launches)
        return out_MD

    for each, by_layer in ((counted_step, False), (counted_layer, True)):
        llm = engine(method, "llada", 2, Way(fixed=True))
        with monkeypatch.context() as patch:
            patch.setattr(*(DriftGate, "run", each) if by_layer else (Step, "__call__", each))
            prompts = [{"prompt_token_ids": [7 + number, 3, 5]} for number in range(2)]
            llm.generate(prompts, SamplingParams(max_tokens=20, threshold=0.9))
    return steps, layers


@pytest.mark.parametrize("method", ["dllm-cache", "spa-cache"])
def test_a_gated_layer_launches_little(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, layers = count(method, monkeypatch)
    assert steps
    assert layers
    assert max(each.small.total() for each in layers) <= MOST
    assert max(each.ops.total() for each in layers) <= MOST


def test_an_operation_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the counter."""
    with counting(monkeypatch) as launches:
        x = torch.ones(3)
        _ = x.view(3, 1).expand(3, 2)
        ops.rms_norm(x + 1, x, 0.0)
    assert launches.small == {"ones": 1, "add": 1}
    assert launches.ops == {"rms_norm": 1}
