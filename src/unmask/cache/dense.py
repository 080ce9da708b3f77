"""Dense K/V of every seat: the canvas, scratch entries behind it, and one entry that is written and never read.

L layers, S seats, E = N + X + 1 entries, N canvas, X scratch, Q rows a seat
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask import ops
from unmask.core.rows import FixedPlan
from unmask.models.attention import AttentionWeights, RopeTable
from unmask.models.config import ModelConfig


@dataclass(frozen=True)
class DenseCache:
    """K after rotation, and V, of all layers: [L, S, E, Hkv, hd]."""

    k: Tensor
    v: Tensor
    num_canvas: int

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        num_seats: int,
        capacity: int,
        num_scratch: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> DenseCache:
        """All zeros: entries that no row wrote are never visible, but must be numbers."""
        shape = (config.num_layers, num_seats, capacity + num_scratch + 1, config.num_kv_heads, config.head_dim)
        k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return cls(k, v, capacity)

    @property
    def trash(self) -> int:
        """The entry that takes what padding rows write."""
        return self.k.shape[2] - 1


class DenseCacheContext:
    """Attention context of one fixed plan over a `DenseCache`; hidden rows are [S, Q, D]."""

    def __init__(self, plan: FixedPlan, cache: DenseCache, rope: RopeTable) -> None:
        self._plan, self._cache = plan, cache
        self._cos, self._sin = rope.at(plan.pos_SQ)

    def project(self, layer: int, hidden: Tensor, weights: AttentionWeights) -> Tensor:
        """Writing comes before attention and is unconditional: the cache is what a later pass does not recompute."""
        q, k, v = weights.split(hidden)
        index = self._plan.write_SQ[:, :, None, None].expand_as(k)
        self._cache.k[layer].scatter_(1, index, ops.rope(k, self._cos, self._sin).to(self._cache.k.dtype))
        self._cache.v[layer].scatter_(1, index, v.to(self._cache.v.dtype))
        return ops.rope(q, self._cos, self._sin)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        plan = self._plan
        out = ops.attend(
            q,
            self._cache.k[layer],
            self._cache.v[layer],
            see_SQ=plan.see_SQ,
            shadow_SN=plan.shadow_SN,
            live_SJ=plan.live_SJ,
            live_bits_SQJ=plan.live_bits_SQJ,
        )
        return out.flatten(-2)
