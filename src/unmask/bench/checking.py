"""How an operation is compared with its definition: in fp64, on fresh numbers, with new memory that holds NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BOUNDS: Mapping[torch.dtype, float] = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Relative error against fp64: two roundings to the type, between the parts and of what comes out."""


def error(ours: Tensor, right: Tensor) -> float:
    """Relative, over the whole tensor; NaN stays NaN."""
    return float((ours.double() - right.double()).norm() / right.double().norm().clamp(min=1e-9))


def within(errors: Mapping[str, float], bound: float | Mapping[str, float]) -> bool:
    """Whether every error is under its bound; NaN is under none."""
    bounds = bound if isinstance(bound, Mapping) else dict.fromkeys(errors, bound)
    return all(value < bounds[name] for name, value in errors.items())


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN, or -1: what a kernel forgets to write is seen."""
    empty, like, method = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def fill(out: Tensor) -> Tensor:
        return out.fill_(float("nan") if out.is_floating_point() else -1) if out.dtype != torch.bool else out

    def poison(make: Any) -> Any:
        return lambda *args, **kwargs: fill(make(*args, **kwargs))

    torch.empty, torch.empty_like = poison(empty), poison(like)
    torch.Tensor.new_empty = poison(method)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, like
        del torch.Tensor.new_empty  # what lies below it, in torch's own base class, is seen again
