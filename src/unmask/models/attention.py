"""How rows see each other: the attention context, which a caller hands to the model's forward.

B sequences, N width of a padded sequence, D hidden size, H query heads, Hkv key heads, hd head
size
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unmask import ops


class RopeTable:
    """cos and sin of the rotary angles, fp32, one row per position; grown on demand, never saved.

    All rows of all passes read the same table: equal positions get equal bits, alone or in a batch.
    """

    def __init__(self, head_dim: int, theta: float, max_positions: int) -> None:
        self.head_dim, self.theta, self.max_positions = head_dim, theta, max_positions
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def at(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [.., hd/2] of the positions `pos` int [..].

        On the CPU the table grows to what is asked. On other devices, and under torch.compile, where a look at the
        values would cost a synchronisation or a graph break, it has `max_positions` rows at least: positions beyond
        need `reserve` first.
        """
        if pos.device.type == "cpu" and not torch.compiler.is_compiling():
            num_positions = int(pos.max()) + 1 if pos.numel() else 1
        else:
            num_positions = self.max_positions
        cos, sin = self.reserve(num_positions, pos.device)
        return cos[pos], sin[pos]

    def reserve(self, num_positions: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """The whole table on `device`, cos and sin [P, hd/2] with P >= `num_positions`."""
        device = torch.device(device)
        table = self._tables.get(device)
        if table is None or len(table[0]) < num_positions:
            grown = num_positions if table is None else max(num_positions, 2 * len(table[0]))
            table = self._tables[device] = self._build(grown, device)
        return table

    # Tables outlive the pass that asks for them: built by an inference pass, they must still serve a training pass.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _build(self, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        even = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        frequency = 1.0 / self.theta ** (even / self.head_dim)
        position = torch.arange(num_positions, dtype=torch.float32, device=device)
        angle = position.unsqueeze(-1) * frequency
        return angle.cos(), angle.sin()


class Linear(nn.Linear):
    """A product that may run as one of our kernels."""

    fp8 = False
    """The product takes its rows in 8 bits."""

    def forward(self, x: ops.Rows) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class AttentionWeights(nn.Module):
    """One layer's projections: `qkv` [(H + 2 Hkv) * hd, D], fused, with a bias where the family has one, and `out`
    [D, H * hd]."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.out = Linear(num_heads * head_dim, hidden_size, bias=False)

    def split(self, hidden: ops.Rows) -> tuple[Tensor, Tensor, Tensor]:
        """q [.., H, hd], k and v [.., Hkv, hd] of the rows `hidden` [.., D]; no rotation yet."""
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2)
        return q, k, v

    def values(self, hidden: Tensor) -> Tensor:
        """v [.., Hkv * hd] alone, bias included."""
        size, bias = self.num_kv_heads * self.head_dim, self.qkv.bias
        return ops.linear(hidden, self.qkv.weight[-size:], None if bias is None else bias[-size:])


class LayerGate(Protocol):
    """Runs a layer in a way of its own: on some of the rows only, with what is kept of the others."""

    @property
    def num_rows_S(self) -> Tensor:
        """int64: rows that each seat's layers computed, on average."""
        ...

    def run(self, layer: Any, x: Tensor) -> Tensor:
        """The stream [M, D] behind the layer (`transformer.Layer`), of the stream before it."""
        ...


class AttentionContext(Protocol):
    """What a pass sees. The model calls `project`, then `attend`, once per layer, layers in order.

    Rows keep the shape [..] in which the caller gave the tokens; the context knows their positions.
    """

    gate: LayerGate | None
    """Runs the layers instead, where there is one."""

    def project(self, layer: int, hidden: ops.Rows, weights: AttentionWeights) -> Tensor:
        """Queries [.., H, hd] after rotation of the normed rows `hidden` [.., D]; k and v land where this context
        keeps them."""
        ...

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention output [.., H * hd], before the output projection. A row that sees nothing gets zeros."""
        ...


class DenseContext:
    """A rectangular batch without a cache: the rows of this pass see each other only.

    `pos`: int [N] or [B, N]. `see`: int [B], the rows of sequence b see the keys [0, see_b).
    `mask`: bool [N, N] or [B, N, N], True where row i may attend to key j. With both, both must allow.
    Hidden rows are [B, N, D].
    """

    def __init__(self, pos: Tensor, *, see: Tensor | None = None, mask: Tensor | None = None, rope: RopeTable) -> None:
        self.gate: LayerGate | None = None
        self._cos, self._sin = rope.at(pos)
        self._see, self._mask = see, mask
        self._kv: tuple[Tensor, Tensor] | None = None

    def project(self, layer: int, hidden: ops.Rows, weights: AttentionWeights) -> Tensor:  # noqa: ARG002
        q, k, v = weights.split(hidden)
        self._kv = ops.rope(k, self._cos, self._sin), v
        return ops.rope(q, self._cos, self._sin)

    def attend(self, layer: int, q: Tensor) -> Tensor:  # noqa: ARG002
        assert self._kv is not None, "attend before project"
        (k, v), self._kv = self._kv, None  # let go: the last layer's keys must not outlive the pass
        return ops.attention(q, k, v, mask=self._mask, see=self._see).flatten(-2)
