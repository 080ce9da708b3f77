"""Counter-based randomness: a draw depends on (seed, position, pass, purpose) and on nothing else.

So a request draws the same numbers alone, in any batch, in any seat and on any device. S seats, N positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKEN, ORDER, FILL, RANK, VERIFY = range(5)  # purposes: independent streams of one request

# Constants of the SplitMix64 generator (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniform(seed_S: Tensor, pos_1N: Tensor, pass_S: Tensor, purpose: int) -> Tensor:
    """float32 [S, N] in [0, 1): 24 random bits for each seat and position.

    ``seed`` int64 [S], ``pos`` int [1, N], ``pass`` int [S].
    """
    key_S = _mix(seed_S * 8 + purpose + _GOLDEN)
    key_S = _mix(key_S + pass_S.long() * _GOLDEN)
    bits_SN = _mix(key_S[:, None] + (pos_1N.long() + 1) * _GOLDEN)
    return _shift(bits_SN, 40).float() * 2.0**-24


def gumbel(uniform_SN: Tensor) -> Tensor:
    """Gumbel noise from uniform numbers; adding it to log-weights and sorting draws without replacement."""
    tiny = torch.finfo(torch.float32).tiny
    exponential_SN = -torch.log(uniform_SN.clamp(min=tiny))
    return -torch.log(exponential_SN.clamp(min=tiny))
