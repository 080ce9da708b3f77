"""Products of 8-bit floats (e4m3): weights with a scale a channel, rows with a scale a row.

M rows, D input size, N output channels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 448.0
"""Of e4m3: the largest magnitude of a row or channel is stored as this."""
SMALLEST = 1e-30
"""Rows and channels that nowhere reach this are zeros: 448 / 1e-30 is still a normal fp32 number, and its inverse."""


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A weight [N, D] kept in 8 bits. `torch.nn.functional.linear` takes it in a tensor's place."""

    value_ND: Tensor
    """float8_e4m3fn."""
    scale_N: Tensor
    """fp32, one factor an output channel: weight = value * scale."""

    @classmethod
    def quantize(cls, weight: Tensor) -> Fp8Weight:
        """The nearest 8-bit weight, channel by channel."""
        return cls(*quantize_rows(weight))

    def dequantize(self) -> Tensor:
        """fp32 [N, D]."""
        return self.value_ND.float() * self.scale_N[:, None]

    def __getitem__(self, channels: slice) -> Fp8Weight:
        return Fp8Weight(self.value_ND[channels], self.scale_N[channels])

    @property
    def shape(self) -> torch.Size:
        return self.value_ND.shape

    def __len__(self) -> int:
        return len(self.value_ND)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not any(isinstance(arg, Fp8Weight) for arg in (args[0], *args[2:])):
            return linear_fp8(*args, **(kwargs or {}))
        return NotImplemented


@dataclass(frozen=True, eq=False)
class Fp8Rows:
    """Rows [.., D] that were quantised where they were made, for a product with an `Fp8Weight`."""

    value: Tensor
    """float8_e4m3fn."""
    scale: Tensor
    """fp32 [..]: row = value * scale."""
    dtype: torch.dtype
    """What the rows were, and what the product is."""

    @classmethod
    def quantize(cls, x: Tensor) -> Fp8Rows:
        value_MD, scale_M = quantize_rows(x.reshape(-1, x.shape[-1]))
        return cls(value_MD.view(x.shape), scale_M.view(x.shape[:-1]), x.dtype)


def quantize_rows(x_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``x`` [M, D] in 8 bits: value float8_e4m3fn [M, D] and scale fp32 [M], x = value * scale.

    The largest magnitude of a row becomes 448. Rows that are scaled alone do not know their neighbours.
    """
    wide_MD = x_MD.float()
    most_M = wide_MD.abs().amax(-1) if x_MD.shape[-1] else wide_MD.new_zeros(len(x_MD))
    most_M = most_M.clamp(min=SMALLEST)
    # 448 times the rounded inverse of the scale is at most 448.0001, which still rounds to 448: nothing overflows.
    # Tensor by tensor: torch rounds a number over a tensor twice, and on a GPU multiplies by a number's inverse.
    largest_M = torch.full_like(most_M, LARGEST)
    value_MD = (wide_MD * (largest_M / most_M)[:, None]).to(torch.float8_e4m3fn)
    return value_MD, most_M / largest_M


def linear_fp8(x: Tensor | Fp8Rows, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """``x`` [.., D] times the weight [N, D], plus ``bias`` [N]; returns [.., N] in x's dtype.

    Rows that are not quantised yet are on the fly. The sum of the products of 8-bit values is fp32; then come the two
    scales and the bias, and one rounding.
    """
    rows = x if isinstance(x, Fp8Rows) else Fp8Rows.quantize(x)
    sum_MN = F.linear(rows.value.float(), weight.value_ND.float())
    out_MN = sum_MN * rows.scale[..., None] * weight.scale_N
    if bias is not None:
        out_MN = out_MN + bias.float()
    return out_MN.to(rows.dtype)
