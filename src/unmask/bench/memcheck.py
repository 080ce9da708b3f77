"""Every kernel once, at a small odd size, to be run under a checker of memory accesses:

    compute-sanitizer --tool memcheck python -m unmask.bench.memcheck

Prints a line a kernel, and whether it was right. Without the checker it is a quick look at all kernels.

M rows, D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unmask.bench import kernels_attend
from unmask.bench.checking import BOUNDS, errors_of, poisoned, within
from unmask.bench.kernels import tiny_cases, triton_ops
from unmask.bench.trial import check
from unmask.ops.reference import linear as linear_reference
from unmask.ops.reference import project as project_reference
from unmask.ops.reference.fp8 import Fp8Weight

BF16 = torch.bfloat16
DEVICE = "cuda"


def run() -> bool:
    """Whether all were right."""
    right = True
    for name, look in cases():
        ok = look()
        right &= ok
        print(f"{name}: {'right' if ok else 'WRONG'}", flush=True)
    torch.cuda.synchronize()
    return right


def cases() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Name, and what says whether it was right."""
    for case in tiny_cases(triton_ops(), DEVICE):
        trial = case.make()
        yield case.op, lambda case=case, trial=trial: bool(check(case, trial)["ok"])  # type: ignore[misc]
    for name, options in (
        ("attend, ragged", {}),
        ("attend, fixed, live list", {"per_seat": 40, "num_live": 5}),
        ("attend, grouped heads", {"per_seat": 40, "heads": (14, 2)}),
    ):
        yield name, lambda options=options: _attend(**options)  # type: ignore[misc]
    yield "project_and_store, one kernel", _fused
    yield "linear and linear_swiglu", _linear
    yield "linear in 8 bits", _linear_fp8


def _attend(**options: Any) -> bool:
    from unmask.ops.triton import attend

    usual: dict[str, Any] = {"heads": (4, 4), "head_dim": 64, "num_positions": 144, "dtype": BF16, "device": DEVICE}
    call = kernels_attend.make_call((1, 33, 0, 7), **usual | options)
    return bool(kernels_attend.check(attend, call, num_splits=2)["ok"])


def _fused() -> bool:
    from unmask.ops.triton import project

    hidden, weight = _randn(19, 96), _randn(6 * 32, 96)
    angle = torch.rand(19, 16, device=DEVICE) * 6
    write_M = torch.randperm(40, device=DEVICE)[:19]
    found = []
    for way, dtype in ((project.fused, BF16), (project_reference.project_and_store, torch.float64)):
        k_E, v_E = (torch.zeros(40, 1, 32, device=DEVICE, dtype=dtype) for _ in range(2))
        arguments = (hidden.to(dtype), weight.to(dtype), None, angle.cos(), angle.sin(), write_M, k_E, v_E)
        with poisoned():
            found.append((way(*arguments), k_E, v_E))
    return all(_near(ours, right) for ours, right in zip(*found))


def _linear() -> bool:
    from unmask.ops.triton import linear

    x, weight = _randn(19, 104), _randn(70, 104)
    wide = x.double(), weight.double()
    shared = replace(linear.tile_for(19, 70), splits=2)
    with poisoned():
        found = [linear.linear(x, weight), linear.linear(x, weight, tile=shared), linear.linear_swiglu(x, weight)]
    right = [linear_reference.linear(*wide)] * 2 + [linear_reference.linear_swiglu(*wide)]
    return all(_near(*each) for each in zip(found, right))


def _linear_fp8() -> bool:
    from unmask.ops.triton import fp8, linear

    if not linear.is_hopper(torch.device(DEVICE, torch.cuda.current_device())):
        return True
    x, weight = _randn(19, 112), Fp8Weight.quantize(_randn(64, 112))
    tile = linear.Tile(64, 128, 1, 2, 4, 3)
    with poisoned():
        out = linear.linear_fp8(*fp8.quantize_rows(x), weight, tile=tile)
    return _near(out, linear_reference.linear(x, weight))


def _near(ours: Tensor, right: Tensor) -> bool:
    return within(errors_of(out=(ours, right)), BOUNDS[BF16])


def _randn(*size: int) -> Tensor:
    return torch.randn(*size, device=DEVICE).to(BF16)


if __name__ == "__main__":
    raise SystemExit(0 if run() else 1)
