"""The 8-bit products and what quantises for them: right, and beside the bf16 products that they replace.

Rows of `unmask bench kernels`, on a GPU that multiplies 8-bit floats.

M rows, K columns of a weight, N its rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.bench.checking import errors_of, poisoned
from unmask.bench.floor import Cost
from unmask.bench.trial import Case, Trial
from unmask.ops.reference import fp8 as reference
from unmask.ops.reference import mlp, norm
from unmask.ops.reference.fp8 import Fp8Weight

BF16 = torch.bfloat16
PRODUCTS = {"qkv": (12288, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""N and K of LLaDA-8B's layers."""
ROWS = (1, 16, 32, 64, 128, 256, 1024)
WEIGHT_BYTES = 400e6
"""8-bit weights that a measurement goes through: several times the cache, so that each is read from memory."""
MAX_WEIGHTS = 24
PRODUCT_BOUND = 5e-3
"""Beside the same sum in fp32: bf16 keeps 2^-9, and the matrix units add with fewer bits than fp32's."""
QUANTISED_BOUND = 5e-3
"""Beside the reference: a sum in another order moves few values, each by one step of 2^-3."""
NORMED_BOUND = 3e-2
"""The same behind a norm or the activation: if their rounding in another order moves the largest value of a row (by
2^-8 in bf16), the whole row is quantised anew; where one row is all, that is as much as 8 bits err, 2^-4 / sqrt(3)."""
SUM_BOUND = 1e-9
"""A sum of two numbers, rounded once: the same bits."""
EPS = 1e-5


class ReferenceKernels:
    """The reference under the names of the kernels, for devices without them."""

    quantize_rows = staticmethod(reference.quantize_rows)
    linear_fp8 = staticmethod(reference.linear_fp8)

    @staticmethod
    def product(value_MD: Tensor, scale_M: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        return F.linear(value_MD.float() * scale_M[:, None], weight.dequantize(), bias).to(BF16)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return reference.quantize_rows(norm.rms_norm(x, weight, eps))

    @staticmethod
    def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return x + delta, *reference.quantize_rows(norm.rms_norm(x + delta, weight, eps))

    @staticmethod
    def swiglu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        return reference.quantize_rows(mlp.swiglu(gate_up))


MIN_CAPABILITY = (8, 9)
"""Of GPUs whose matrix units take 8-bit floats."""


def triton_kernels() -> Any:
    """The kernels, under these names; None where the GPU or this version of torch has no such products."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return None
    from unmask.ops.triton import fp8

    return fp8 if fp8.product_supported(BF16, Fp8Weight.quantize(torch.zeros(16, 16, device="cuda"))) else None


def _randn(*size: int, device: Any, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size, device=device) * scale).to(BF16)


def _back(made: tuple[Tensor, Tensor]) -> Tensor:
    value, scale = made
    return value.float() * scale[..., None]


def product_trial(kernels: Any, num_rows: int, num_out: int, size: int, device: Any) -> Trial:
    """Quantise and multiply, beside the bf16 product; a product of 8-bit floats costs half of a bf16 one."""
    on_gpu = torch.device(device).type == "cuda"
    count = min(MAX_WEIGHTS, max(2, int(WEIGHT_BYTES // (num_out * size)))) if on_gpu else 2
    weights = [_randn(num_out, size, device=device, scale=0.02) for _ in range(count)]
    narrow = [Fp8Weight.quantize(each) for each in weights]
    x_MD = _randn(num_rows, size, device=device)
    quantised = kernels.quantize_rows(x_MD)

    def errors() -> dict[str, float]:
        with poisoned():
            out_MN = kernels.linear_fp8(x_MD, narrow[0])
        return errors_of(out=(out_MN, reference.linear_fp8(x_MD, narrow[0])))

    exact = errors_of(exact=(reference.linear_fp8(x_MD, narrow[0]), F.linear(x_MD, weights[0])))
    return Trial(
        errors=errors,
        bound=PRODUCT_BOUND,
        cost=Cost(num_out * size + 2 * num_rows * (size + num_out), num_rows * num_out * size),
        ours=lambda i: kernels.linear_fp8(x_MD, narrow[i % count]),
        others={"bf16 product": lambda i: F.linear(x_MD, weights[i % count])},
        parts={
            "quantise": lambda _: kernels.quantize_rows(x_MD),
            "8-bit product": lambda i: kernels.product(*quantised, narrow[i % count], None),
        },
        num_calls=count,
        facts={"to_exact": exact["exact"]},
    )


def quantise_trial(kernels: Any, op: str, num_rows: int, size: int, device: Any) -> Trial:
    """Fused with what makes the rows, beside making them and quantising what was written."""
    x, delta = (_randn(num_rows, size, device=device) for _ in range(2))
    weight, gate_up = _randn(size, device=device), _randn(num_rows, 2 * size, device=device)
    x[2::3] *= 1e-3  # epsilon decides
    delta[2::3] *= 1e-3
    x[3::7] = delta[3::7] = gate_up[3::7] = 0  # padding
    fused: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "quantize_rows": lambda: kernels.quantize_rows(x),
        "rms_norm_fp8": lambda: kernels.rms_norm(x, weight, EPS),
        "add_rms_norm_fp8": lambda: kernels.add_rms_norm(x, delta, weight, EPS),
        "swiglu_fp8": lambda: kernels.swiglu(gate_up),
    }
    rows: dict[str, Callable[[], Tensor]] = {
        "quantize_rows": lambda: x,
        "rms_norm_fp8": lambda: norm.rms_norm(x, weight, EPS),
        "add_rms_norm_fp8": lambda: norm.rms_norm(x + delta, weight, EPS),
        "swiglu_fp8": lambda: mlp.swiglu(gate_up),
    }
    bytes_a_value = {"quantize_rows": 3, "rms_norm_fp8": 3, "add_rms_norm_fp8": 7, "swiglu_fp8": 5}[op]

    def errors() -> dict[str, float]:
        with poisoned():
            *total, value, scale = fused[op]()
        right = reference.quantize_rows(rows[op]())
        more = {"sum": (total[0], x + delta)} if total else {}
        return errors_of(values=(_back((value, scale)), _back(right)), scale=(scale, right[1]), **more)

    most = QUANTISED_BOUND if op == "quantize_rows" else NORMED_BOUND
    return Trial(
        errors=errors,
        bound={"values": most, "scale": most, "sum": SUM_BOUND},
        cost=Cost(bytes_a_value * num_rows * size),
        ours=lambda _: fused[op](),
        others={"torch": lambda _: reference.quantize_rows(rows[op]())},
        num_calls=32,
    )


QUANTISING = ("quantize_rows", "rms_norm_fp8", "add_rms_norm_fp8", "swiglu_fp8")


def checks(kernels: Any, device: Any) -> Iterator[Case]:
    """Rows on both sides of what a tile takes, and rows of odd sizes."""
    for name in PRODUCTS:
        for num_rows in (33, 129, 161):
            yield _product(kernels, name, num_rows, device)
    for op in QUANTISING:
        for size in (100, 3584, 18944):
            yield _quantising(kernels, op, 13, size, device)


def cases(kernels: Any, device: Any, *, quick: bool = False) -> Iterator[Case]:
    """LLaDA-8B's sizes."""
    for name in PRODUCTS:
        for num_rows in (128,) if quick else ROWS:
            yield _product(kernels, name, num_rows, device)
    for op in QUANTISING:
        for num_rows in (128,) if quick else (1, 128, 1000):
            yield _quantising(kernels, op, num_rows, 12288 if op == "swiglu_fp8" else 4096, device)


def tiny_cases(kernels: Any, device: Any) -> list[Case]:
    """Sizes for a CPU, or for a checker of memory accesses."""
    shape = {"rows": 3, "out": 32, "size": 48}
    product = Case("linear_fp8", shape, lambda: product_trial(kernels, 3, 32, 48, device))
    return [product, *(_quantising(kernels, op, 5, 40, device) for op in QUANTISING)]


def _product(kernels: Any, name: str, num_rows: int, device: Any) -> Case:
    num_out, size = PRODUCTS[name]
    shape = {"weight": name, "rows": num_rows, "out": num_out, "size": size}
    return Case("linear_fp8", shape, partial(product_trial, kernels, num_rows, num_out, size, device))


def _quantising(kernels: Any, op: str, num_rows: int, size: int, device: Any) -> Case:
    make = partial(quantise_trial, kernels, op, num_rows, size, device)
    return Case(op, {"rows": num_rows, "size": size}, make)
