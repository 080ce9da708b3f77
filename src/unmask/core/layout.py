"""Block geometry: which diffusion block a canvas position belongs to."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.errors import EngineError


def blocks(length: int, prompt: int, block_length: int) -> Tensor:
    """int16 [length]: 0 in the prompt, 1, 2, ... from the prompt's end; the last block may be shorter.

    ``block_length`` 0 makes the whole answer one block. Blocks start at the prompt's end, not at multiples of their
    length (D2F section A and LLaDA's semi-autoregressive sampling agree on that).
    """
    if not 0 <= prompt <= length:
        raise EngineError(f"a prompt of {prompt} positions does not fit a canvas of {length}")
    offset = torch.arange(length) - prompt
    size = block_length or max(length - prompt, 1)
    return torch.where(offset < 0, 0, 1 + offset.div(size, rounding_mode="floor")).to(torch.int16)
