"""How large the pool of K/V is."""

from __future__ import annotations

import os

import torch

from unmask.cache.pool import PAGE_SIZE, PagePool, PlaneSpec, bytes_per_page, kv_planes, num_pages_for
from unmask.config import EngineConfig
from unmask.engine.axes import Axes
from unmask.engine.scoring import Model
from unmask.errors import ConfigError

_CPU_SHARE = 0.25  # of the machine's memory: other programs live there too


def make_pool(model: Model, config: EngineConfig, *, num_seats: int, max_model_len: int, axes: Axes) -> PagePool:
    """A pool for so many seats: pages for a full canvas in each, or as many as the memory allows.

    Raises:
        ConfigError: the memory does not hold one canvas of ``max_model_len``.
    """
    device, num_layers = model.head.device, model.config.num_layers
    planes = planes_of(model, axes)
    per_canvas = num_pages_for(max_model_len)
    num_bytes = _num_bytes(config, device)
    # Entries that no page holds come out of the same memory: the trash page and every seat's scratch.
    num_scratch_pages = num_pages_for(num_seats * axes.drafter.num_scratch)
    num_pages = min(
        PagePool.num_pages_in(num_bytes, planes, num_layers) - num_scratch_pages, config.max_num_seqs * per_canvas
    )
    if num_pages < per_canvas:
        page = bytes_per_page(planes, num_layers)
        raise ConfigError(
            f"a canvas of max_model_len={max_model_len} takes {per_canvas} pages of {page / 2**10:,.0f} KiB and "
            f"{num_bytes / 2**10:,.0f} KiB hold {max(num_pages, 0)}; lower max_model_len or max_num_seqs, or raise "
            "kv_cache_memory_bytes or gpu_memory_utilization"
        )
    return PagePool(
        planes,
        num_layers=num_layers,
        num_pages=num_pages,
        num_seats=num_seats,
        max_positions=per_canvas * PAGE_SIZE,
        num_scratch=axes.drafter.num_scratch,
        device=device,
    )


def planes_of(model: Model, axes: Axes) -> dict[str, PlaneSpec]:
    """K and V, and what the policy keeps."""
    dtype = model.head.dtype
    return kv_planes(model.config, dtype) | axes.policy.planes(model.config, dtype)


def bytes_for(model: Model, axes: Axes, *, num_pages: int, num_seats: int) -> int:
    """``kv_cache_memory_bytes`` that gives a pool of just so many pages."""
    planes = planes_of(model, axes)
    unheld = 1 + num_pages_for(num_seats * axes.drafter.num_scratch)
    return (num_pages + unheld) * bytes_per_page(planes, model.config.num_layers)


def _num_bytes(config: EngineConfig, device: torch.device) -> int:
    """Memory that the pool may take."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - config.gpu_memory_utilization) * total)
    return int(_machine_bytes() * _CPU_SHARE)


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not told on this system
        return 16 << 30
