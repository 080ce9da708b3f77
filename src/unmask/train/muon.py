"""Muon: momentum, orthogonalised, for the matrices inside the layers.

A fused matrix is several matrices (q, k, v; gate, up): each part is orthogonalised by itself. Parts of one shape, from
all layers, go through one batched Newton-Schulz iteration, so a step is a few kernels however deep the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unmask.models.config import ModelConfig

# Odd quintic a x + b x^3 + c x^5, applied five times: pushes singular values from (0, 1] to about [0.7, 1.2]. The
# steep slope at 0 matters more than landing on 1 exactly.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5


def orthogonalize(matrix_KRC: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Matrices [K, R, C] with the same singular vectors and singular values near 1."""
    a, b, c = COEFFICIENTS
    x = matrix_KRC.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(dtype) + 1e-7)
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x.mT if tall else x
    return out


def part_rows(name: str, config: ModelConfig) -> list[int] | None:
    """Rows of the parts of the layer matrix `name`; None when Muon has no business with this parameter."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "attn.qkv.weight": [q, kv, kv],
        "attn.out.weight": [config.hidden_size],
        "mlp.gate_up.weight": [config.intermediate_size] * 2,
        "mlp.down.weight": [config.hidden_size],
    }
    return next((rows for ending, rows in parts.items() if name.endswith("." + ending)), None)


def is_matrix(name: str, config: ModelConfig) -> bool:
    """Is this parameter Muon's? All others are AdamW's."""
    return part_rows(name, config) is not None


class Muon:
    """buffer <- m buffer + (1 - m) g;  u = (1 - m) g + m buffer (Nesterov);  W <- (1 - lr wd) W - lr s orth(u)

    per part, with s = sqrt(max(1, rows / columns)).
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        rows: Mapping[str, Sequence[int]],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        self.params = dict(params)
        self.rows = {name: list(rows[name]) for name in self.params}
        self.momentum, self.weight_decay = momentum, weight_decay
        self.buffers = {name: torch.zeros_like(p) for name, p in self.params.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the parameters' gradients."""
        params = list(self.params.values())
        if not params:
            return
        torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        groups: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, direction in zip(self.params, self._directions()):
            rows = self.rows[name]
            for part, update in zip(self.params[name].split(rows), direction.split(rows)):
                groups[part.shape].append((part, update))
        for shape, pairs in groups.items():
            _apply(shape, pairs, lr)

    def _directions(self) -> list[Tensor]:
        """Nesterov momentum; changes the buffers."""
        grads = [_grad(p) for p in self.params.values()]
        buffers = list(self.buffers.values())
        torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
        return list(torch._foreach_lerp(grads, buffers, self.momentum))


def _grad(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _apply(shape: torch.Size, pairs: Sequence[tuple[Tensor, Tensor]], lr: float) -> None:
    """One batched update of all parts of one shape."""
    stacked = torch.stack([update for _, update in pairs])
    dtype = torch.bfloat16 if stacked.is_cuda else torch.float32
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    updates = orthogonalize(stacked, dtype).to(pairs[0][0].dtype)
    torch._foreach_add_([part for part, _ in pairs], list(updates.unbind()), alpha=-lr * scale)
