"""The gated activation of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for `gate_up` [.., 2F] = gate, then up, side by side; returns [.., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
