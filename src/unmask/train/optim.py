"""Both optimizers behind one step, one clip and one flat state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unmask.errors import CheckpointError
from unmask.models.config import ModelConfig
from unmask.train.config import OptimizerConfig
from unmask.train.muon import Muon, part_rows


class Optimizer:
    """Muon on the matrices of the layers, AdamW without weight decay on everything else."""

    def __init__(self, model: nn.Module, model_config: ModelConfig, config: OptimizerConfig) -> None:
        self.config = config
        self.params = dict(model.named_parameters())
        rows = {name: part_rows(name, model_config) for name in self.params}
        matrices = {name: r for name, r in rows.items() if r is not None}
        self.others = {name: p for name, p in self.params.items() if rows[name] is None}
        self.muon = Muon(
            {name: self.params[name] for name in matrices},
            matrices,
            momentum=config.muon_momentum,
            weight_decay=config.weight_decay,
        )
        fused = all(p.is_cuda for p in self.others.values())
        self.adam = torch.optim.AdamW(
            list(self.others.values()), lr=config.adam_lr, betas=config.betas, weight_decay=0.0, fused=fused
        )

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale all gradients to a global norm of at most grad_clip; the norm before, without waiting for it."""
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self.config.grad_clip > 0:
            torch._foreach_mul_(grads, (self.config.grad_clip / (norm + 1e-6)).clamp_max(1.0))
        return norm

    def step(self, factor: float) -> None:
        """One update at `factor` times the learning rates; gradients are dropped."""
        for group in self.adam.param_groups:
            group["lr"] = self.config.adam_lr * factor
        self.adam.step()
        self.muon.step(self.config.muon_lr * factor)
        for param in self.params.values():
            param.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything a later `load` needs, by flat names."""
        out = {f"muon.{name}": buffer for name, buffer in self.muon.buffers.items()}
        for name, param in self.others.items():
            for key, value in self.adam.state[param].items():
                out[f"adam.{key}.{name}"] = torch.as_tensor(value)
        return out

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up a `state()`; one taken before the first step has nothing of AdamW's."""
        try:
            for name, buffer in self.muon.buffers.items():
                buffer.copy_(state[f"muon.{name}"])
        except KeyError as error:
            raise CheckpointError(f"the saved state has no {error}; it belongs to another model") from error
        for name, param in self.others.items():
            keys = {k: f"adam.{k}.{name}" for k in ("step", "exp_avg", "exp_avg_sq")}
            if keys["step"] in state:
                self.adam.state[param] = {k: self._place(k, state[key], param) for k, key in keys.items()}

    def _place(self, key: str, value: Tensor, param: Tensor) -> Tensor:
        fused = self.adam.defaults["fused"]
        device = param.device if key != "step" or fused else torch.device("cpu")
        return value.to(device=device, dtype=torch.float32, copy=True)
