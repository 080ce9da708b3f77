"""One transformer for every family; what its rows see is the context's business.

D hidden size, F MLP size, V vocabulary, H query heads, Hkv key heads, hd head size
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask import ops
from unmask.models.attention import AttentionContext, AttentionWeights, Linear, RopeTable
from unmask.models.config import ModelConfig


class Norm(nn.Module):
    """RMS norm with a gain, `weight` [D]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, *, fp8: bool = False) -> ops.Rows:
        return ops.rms_norm(x, self.weight, self.eps, fp8=fp8)

    def add(self, x: Tensor, delta: Tensor, *, fp8: bool = False) -> tuple[Tensor, ops.Rows]:
        """x + delta, and its norm; ``fp8`` for a product in 8 bits."""
        return ops.add_rms_norm(x, delta, self.weight, self.eps, fp8=fp8)


class MLP(nn.Module):
    """Gated MLP: `gate_up` [2F, D] (gate rows first), `down` [D, F]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: ops.Rows) -> Tensor:
        out: Tensor = self.down(ops.linear_swiglu(x, self.gate_up.weight, fp8=self.down.fp8))
        return out


class Layer(nn.Module):
    """Attention, then MLP, each on the normed stream and added to it."""

    def __init__(self, index: int, config: ModelConfig) -> None:
        super().__init__()
        self.index = index
        self.attn_norm = Norm(config.hidden_size, config.norm_eps)
        self.attn = AttentionWeights(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
        )
        self.mlp_norm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, delta: Tensor | None, ctx: AttentionContext) -> tuple[Tensor, Tensor]:
        """The stream, and what is still to be added to it: each addition is one with the norm that follows."""
        fp8 = self.attn.qkv.fp8
        if delta is None:
            normed = self.attn_norm(x, fp8=fp8)
        else:
            x, normed = self.attn_norm.add(x, delta, fp8=fp8)
        q = ctx.project(self.index, normed, self.attn)
        x, normed = self.mlp_norm.add(x, self.attn.out(ctx.attend(self.index, q)), fp8=self.mlp.gate_up.fp8)
        return x, self.mlp(normed)


class Transformer(nn.Module):
    """The model. `Transformer(config)` has random weights; `load_model` gives a checkpoint's.

    >>> hidden = model(token_BN, DenseContext(torch.arange(N), rope=model.rope))   # [B, N, D], after the final norm
    >>> logits = model.logits(hidden)                                              # [B, N, V]
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.rope = RopeTable(config.head_dim, config.rope_theta, config.max_positions)
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Layer(i, config) for i in range(config.num_layers))
            self.norm = Norm(config.hidden_size, config.norm_eps)
            self.lm_head = (
                None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            )
        self.to(dtype or torch.get_default_dtype())
        device = torch.device(device) if device is not None else torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def forward(self, token: Tensor, ctx: AttentionContext) -> Tensor:
        """Hidden rows [.., D] after the final norm, of the tokens `token` int [..]."""
        x, delta = self.embed(token), None
        if ctx.gate is not None:
            for layer in self.layers:
                x = ctx.gate.run(layer, x)
            return cast(Tensor, self.norm(x))
        for layer in self.layers:
            x, delta = layer(x, delta, ctx)
        return cast(Tensor, self.norm(x) if delta is None else self.norm.add(x, delta)[1])  # 8 bits were not asked for

    @property
    def head(self) -> Tensor:
        """The scoring matrix [V, D]: the embedding itself when the two are tied."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [.., V] of the rows `hidden` [.., D], as the network gives them: `config.logit_shift` not applied."""
        return F.linear(hidden, self.head)

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Random weights for training: normal of deviation `std`; the two matrices that write to the stream smaller
        by sqrt(2 L), so that its variance does not grow with depth; gains 1, biases 0."""
        into_stream = std / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                deviation = into_stream if name.endswith(("attn.out.weight", "mlp.down.weight")) else std
                weight.normal_(0, deviation, generator=generator)
