"""From the host to the device, without a wait.

A number goes there by ``fill_``: ``tensor[i] = number`` makes it a tensor of the host first, and waits for its copy.
"""

from __future__ import annotations

from torch import Tensor


def send(target: Tensor, values: Tensor) -> None:
    """Copy a tensor of the host into a part of a device tensor, behind what the device has been told so far.

    From ordinary memory such a copy would hold the host until the running pass has ended.
    """
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
