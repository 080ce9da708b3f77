"""The 8-bit products and what quantises for them: right, and beside the bf16 products that they replace.

`python -m unmask.bench.kernels_fp8` prints one JSON object a case, on a GPU that multiplies 8-bit floats.

M rows, K columns of a weight, N its rows
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.bench.floor import Cost, measure_ceilings
from unmask.bench.trial import Case, Trial, measure
from unmask.ops.reference import fp8 as reference
from unmask.ops.reference import mlp, norm
from unmask.ops.reference.fp8 import Fp8Weight

BF16 = torch.bfloat16
PRODUCTS = {"qkv": (12288, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""N and K of LLaDA-8B's layers."""
ROWS = (1, 16, 32, 64, 128, 256, 1024)
WEIGHT_BYTES = 400e6
"""8-bit weights that a measurement goes through: several times the cache, so that each is read from memory."""
PRODUCT_BOUND = 5e-3
"""Beside the same sum in fp32: bf16 keeps 2^-9, and the matrix units add with fewer bits than fp32's."""
QUANTISED_BOUND = 5e-3
"""Beside the reference: a sum in another order moves few values, each by one step of 2^-3."""
NORMED_BOUND = 3e-2
"""The same behind a norm or the activation: if their rounding in another order moves the largest value of a row (by
2^-8 in bf16), the whole row is quantised anew; where one row is all, that is as much as 8 bits err, 2^-4 / sqrt(3)."""
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


def relative(ours: Tensor, right: Tensor) -> float:
    """Error over the whole tensor; NaN stays NaN."""
    return float((ours.float() - right.float()).norm() / right.float().norm().clamp(min=1e-9))


def _randn(*size: int, device: Any, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size, device=device) * scale).to(BF16)


def _back(made: tuple[Tensor, Tensor]) -> Tensor:
    value, scale = made
    return value.float() * scale[..., None]


def product_trial(kernels: Any, num_rows: int, num_out: int, size: int, device: Any) -> Trial:
    """Quantise and multiply, beside the bf16 product; a product of 8-bit floats costs half of a bf16 one."""
    count = max(2, int(WEIGHT_BYTES // (num_out * size))) if torch.device(device).type == "cuda" else 2
    weights = [_randn(num_out, size, device=device, scale=0.02) for _ in range(count)]
    narrow = [Fp8Weight.quantize(each) for each in weights]
    x_MD = _randn(num_rows, size, device=device)
    quantised = kernels.quantize_rows(x_MD)
    return Trial(
        errors=lambda: {"out": relative(kernels.linear_fp8(x_MD, narrow[0]), reference.linear_fp8(x_MD, narrow[0]))},
        bound=PRODUCT_BOUND,
        cost=Cost(num_out * size + 2 * num_rows * (size + num_out), num_rows * num_out * size),
        ours=lambda i: kernels.linear_fp8(x_MD, narrow[i % count]),
        others={"bf16 product": lambda i: F.linear(x_MD, weights[i % count])},
        parts={
            "quantise": lambda _: kernels.quantize_rows(x_MD),
            "8-bit product": lambda i: kernels.product(*quantised, narrow[i % count], None),
        },
        num_calls=count,
        facts={"to_exact": relative(reference.linear_fp8(x_MD, narrow[0]), F.linear(x_MD, weights[0]))},
    )


def quantise_trial(kernels: Any, op: str, num_rows: int, size: int, device: Any) -> Trial:
    """Fused with what makes the rows, beside making them and quantising what was written."""
    x, delta = (_randn(num_rows, size, device=device) for _ in range(2))
    weight, gate_up = _randn(size, device=device), _randn(num_rows, 2 * size, device=device)
    fused: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "quantize_rows": lambda: kernels.quantize_rows(x),
        "rms_norm": lambda: kernels.rms_norm(x, weight, EPS),
        "add_rms_norm": lambda: kernels.add_rms_norm(x, delta, weight, EPS)[1:],
        "swiglu": lambda: kernels.swiglu(gate_up),
    }
    rows: dict[str, Callable[[], Tensor]] = {
        "quantize_rows": lambda: x,
        "rms_norm": lambda: norm.rms_norm(x, weight, EPS),
        "add_rms_norm": lambda: norm.rms_norm(x + delta, weight, EPS),
        "swiglu": lambda: mlp.swiglu(gate_up),
    }
    bytes_a_value = {"quantize_rows": 3, "rms_norm": 3, "add_rms_norm": 7, "swiglu": 5}[op]
    return Trial(
        errors=lambda: {"values": relative(_back(fused[op]()), _back(reference.quantize_rows(rows[op]())))},
        bound=QUANTISED_BOUND if op == "quantize_rows" else NORMED_BOUND,
        cost=Cost(bytes_a_value * num_rows * size),
        ours=lambda _: fused[op](),
        others={"torch": lambda _: reference.quantize_rows(rows[op]())},
        num_calls=32,
    )


def cases(kernels: Any, device: Any) -> Iterator[Case]:
    """Everything at LLaDA-8B's sizes; odd ones too."""
    for name, (num_out, size) in PRODUCTS.items():
        for num_rows in ROWS:
            shape = {"weight": name, "rows": num_rows, "out": num_out, "size": size}
            yield Case("linear_fp8", shape, partial(product_trial, kernels, num_rows, num_out, size, device))
    for op in ("quantize_rows", "rms_norm", "add_rms_norm", "swiglu"):
        for num_rows in (1, 128, 1000):
            for size in (12288, 18944, 100) if op == "swiglu" else (4096, 3584, 100):
                shape = {"rows": num_rows, "size": size}
                yield Case(f"{op}, fp8", shape, partial(quantise_trial, kernels, op, num_rows, size, device))


def main() -> None:
    from unmask.ops.triton import fp8

    weight = Fp8Weight.quantize(torch.zeros(16, 16, device="cuda"))
    if not fp8.product_supported(BF16, weight):
        raise SystemExit("the library does not multiply 8-bit floats with scales by row here")
    ceilings = measure_ceilings("cuda")
    for case in cases(fp8, "cuda"):
        print(json.dumps(measure(case, case.make(), "cuda", ceilings, trusted=True)), flush=True)


if __name__ == "__main__":
    main()
