"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

A small kernel costs 2 us, most of it launch and drain. With this its programs start when all of the predecessor's have
started and said so (`gdc_launch_dependents`), read what no kernel of the pass writes, and wait (`gdc_wait`) for the
predecessor's end before they touch anything else. Every kernel that is launched so must wait, or nobody behind it could
rely on what came before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

FIRST_CAPABILITY = (9, 0)


@lru_cache
def early(device: torch.device) -> bool:
    """Whether kernels on this device are launched so: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def options(is_early: bool) -> dict[str, Any]:
    """Launch options of a kernel whose constexpr PDL has this value."""
    return {"launch_pdl": True} if is_early else {}
