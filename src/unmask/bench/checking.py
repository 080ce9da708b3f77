"""How an operation is compared with its definition: in fp64, on fresh numbers, with new memory that holds NaN.

M rows, W numbers of a piece of a row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BOUNDS: Mapping[torch.dtype, float] = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Relative error against fp64: two roundings to the type, between the parts and of what comes out."""


ROW_FACTOR = 3
"""Bound of a piece of a row over that of the whole tensor: two roundings of one number are at most 4e-3 in bf16, and
the worst piece of thousands comes near to what its worst number does."""
WORST = "worst row of "
PIECE = 128
"""Numbers of a row that are compared together, at most. One wrong number of 129 x 4096 is 1e-3 of the whole tensor,
under the bound of bf16, and up to 0.13 of its piece."""
FLOOR = 1e-3
"""A piece whose norm is less than this share of the usual one is measured against that share."""


def error(ours: Tensor, right: Tensor) -> float:
    """Relative, over the whole tensor; NaN stays NaN."""
    return float((ours.double() - right.double()).norm() / right.double().norm().clamp(min=1e-9))


def worst_error(ours: Tensor, right: Tensor, *, floor: float = FLOOR) -> float:
    """Relative error of the worst piece of a row, the last dimension; a vector's numbers are its rows. NaN stays NaN.

    ``floor`` is the `FLOOR`.
    """
    if right.numel() == 0:
        return 0.0
    off_MW, right_MW = (_pieces(each) for each in (ours.double() - right.double(), right.double()))
    size_M = right_MW.norm(dim=-1)
    usual = size_M.square().mean().sqrt()
    return float((off_MW.norm(dim=-1) / size_M.clamp(min=max(1e-30, floor * float(usual)))).amax())


def _pieces(x: Tensor) -> Tensor:
    """Rows cut into equal pieces of at most `PIECE`; what lacks is 0."""
    rows = x[:, None] if x.dim() == 1 else x.flatten(0, -2)
    num_pieces = -(-rows.shape[1] // PIECE)
    width = -(-rows.shape[1] // num_pieces)
    return F.pad(rows, (0, num_pieces * width - rows.shape[1])).view(-1, width)


def errors_of(**outputs: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Of each output, ours beside the right one: its `error`, and its `worst_error` under its own name."""
    whole = {name: error(*both) for name, both in outputs.items()}
    return whole | {WORST + name: worst_error(*both) for name, both in outputs.items()}


def within(errors: Mapping[str, float], bound: float | Mapping[str, float]) -> bool:
    """Whether every error is under its bound, that of a worst row under `ROW_FACTOR` times as much unless it has a
    bound of its own; NaN is under none."""

    def most(name: str) -> float:
        if not isinstance(bound, Mapping):
            return bound * (ROW_FACTOR if name.startswith(WORST) else 1)
        return bound[name] if name in bound else ROW_FACTOR * bound[name.removeprefix(WORST)]

    return all(value < most(name) for name, value in errors.items())


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN, -1 or True: what a kernel forgets to write is seen."""
    empty, like, method = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def fill(out: Tensor) -> Tensor:
        return out.fill_(float("nan") if out.is_floating_point() else -1)  # -1 of a bool is True

    def poison(make: Any) -> Any:
        return lambda *args, **kwargs: fill(make(*args, **kwargs))

    torch.empty, torch.empty_like = poison(empty), poison(like)
    torch.Tensor.new_empty = poison(method)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, like
        del torch.Tensor.new_empty  # what lies below it, in torch's own base class, is seen again
