"""Weights of a model in 8 bits: the four products of every layer, not the embedding and not the head.

D input size, N output channels
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unmask import ops
from unmask.config import QUANTIZATIONS
from unmask.errors import ConfigError, nearest
from unmask.models.transformer import Transformer
from unmask.ops import Fp8Weight

PRODUCTS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
"""Of a layer; in LLaDA-8B they hold 87% of the weights."""
FP8_CAPABILITY = (8, 9)
"""The first GPUs that multiply 8-bit floats: Ada; Hopper follows."""


class Fp8Linear(nn.Module):
    """What `nn.Linear` does, with a weight in 8 bits: buffers `value` [N, D] and `scale` [N], and `bias` or None."""

    fp8 = True
    value: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Fp8Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("value", weight.value_ND)
        self.register_buffer("scale", weight.scale_N)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def empty_like(cls, linear: nn.Linear) -> Fp8Linear:
        """Room for the weight of a linear layer, on its device, not yet filled."""
        value_ND = torch.empty_like(linear.weight, dtype=torch.float8_e4m3fn, requires_grad=False)
        scale_N = torch.empty(len(value_ND), dtype=torch.float32, device=value_ND.device)
        return cls(Fp8Weight(value_ND, scale_N), linear.bias)

    @property
    def weight(self) -> Fp8Weight:
        """The weight as `unmask.ops` takes it."""
        return Fp8Weight(self.value, self.scale)

    @torch.no_grad()
    def fill(self, start: int, part: Tensor) -> None:
        """Quantise ``part`` [.., D] into the channels from ``start`` on. Channels do not know each other, so the parts
        of a fused weight may come one by one."""
        made = Fp8Weight.quantize(part)
        self.value.narrow(0, start, len(part)).copy_(made.value_ND)
        self.scale.narrow(0, start, len(part)).copy_(made.scale_N)

    def forward(self, x: ops.Rows) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        """`model.to(dtype)` is for what is computed with: the weight moves between devices, and stays in 8 bits."""
        fixed = (self.value, self.scale)

        def keep(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            if made.dtype == tensor.dtype or not any(tensor is each for each in fixed):
                return made
            return tensor.to(made.device)

        super()._apply(keep, recurse)
        return self


def is_fp8(model: nn.Module) -> bool:
    """Whether products of this network run in 8 bits."""
    return any(isinstance(each, Fp8Linear) for each in model.modules())


def quantize_(model: Transformer, quantization: str) -> Transformer:
    """Replace the weights of every layer's products in place, one product after the other: beyond the model, memory
    never holds more than one of them.

    Raises:
        ConfigError: an unknown name, or a device that cannot multiply in that format.
    """
    check_device(quantization, model.head.device)
    for layer in model.layers:
        for name in PRODUCTS:
            linear = layer.get_submodule(name)
            if isinstance(linear, nn.Linear):
                _replace(layer, name, Fp8Linear(Fp8Weight.quantize(linear.weight.detach()), linear.bias))
    return model


def make_room(model: Transformer, quantization: str) -> Transformer:
    """The same replacement in a model without weights (device meta): what a loader then fills."""
    check_known(quantization)
    for layer in model.layers:
        for name in PRODUCTS:
            linear = layer.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            _replace(layer, name, Fp8Linear.empty_like(linear))
    return model


def check_known(quantization: str) -> None:
    """Raises ConfigError for a name that is not in `QUANTIZATIONS`."""
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization {quantization!r} is unknown; {nearest(quantization, QUANTIZATIONS)}")


def check_device(quantization: str, device: torch.device | str) -> None:
    """Raises ConfigError where the format is unknown or the device cannot multiply in it. A CPU can, slowly."""
    check_known(quantization)
    device = torch.device(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise ConfigError(
                f"quantization 'fp8' needs compute capability {_dotted(FP8_CAPABILITY)} or more (Ada, Hopper or "
                f"later); {torch.cuda.get_device_name(device)} has {_dotted(capability)}: leave quantization out"
            )
    elif device.type not in ("cpu", "meta"):
        raise ConfigError(f"quantization 'fp8' runs on CUDA and on the CPU, not on {device.type!r}; leave it out")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _replace(layer: nn.Module, name: str, made: Fp8Linear) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(layer.get_submodule(owner), leaf, made)


def num_weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each once."""
    tensors: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
