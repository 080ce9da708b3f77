"""The benchmark of 8-bit products, with the reference in the kernels' place: it says what is right and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unmask.bench import kernels, kernels_fp8, memcheck
from unmask.bench.floor import Ceilings
from unmask.bench.kernels_fp8 import QUANTISING, Fp8Weight, ReferenceKernels, product_trial, quantise_trial
from unmask.bench.names import OPS
from unmask.bench.results import Results
from unmask.bench.trial import Case, Trial, check, measure

CEILINGS = Ceilings(1e10, 1e10)


def right(trial: Trial) -> bool:
    return bool(check(Case("op", {}, lambda: trial), trial)["ok"])


def test_products_and_rows() -> None:
    trials = [product_trial(ReferenceKernels, 3, 32, 48, "cpu")]
    trials += [quantise_trial(ReferenceKernels, op, 9, 40, "cpu") for op in QUANTISING]
    for trial in trials:
        row = measure(Case("op", {}, lambda trial=trial: trial), trial, "cpu", CEILINGS, trusted=True)
        assert row["ok"], row
        assert row["speedup"]


class WrongScale(ReferenceKernels):
    @staticmethod
    def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        value, scale = ReferenceKernels.quantize_rows(x)
        return value, scale * 1.02

    @staticmethod
    def linear_fp8(x: Tensor, weight: Fp8Weight) -> Tensor:
        return ReferenceKernels.product(*WrongScale.quantize_rows(x), weight, None)


class OneNumber(ReferenceKernels):
    """Two numbers of the last row change places."""

    @staticmethod
    def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        value, scale = ReferenceKernels.quantize_rows(x)
        value[-1, :2] = value[-1, [1, 0]]
        return value, scale

    @staticmethod
    def linear_fp8(x: Tensor, weight: Fp8Weight) -> Tensor:
        out = ReferenceKernels.linear_fp8(x, weight)
        out[-1, :2] = out[-1, :2].flip(0)
        return out


class Unwritten(ReferenceKernels):
    """The last row's memory is as it was."""

    @staticmethod
    def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        value, scale = ReferenceKernels.quantize_rows(x)
        out, out_scale = torch.empty_like(value), torch.empty_like(scale)
        out[:-1], out_scale[:-1] = value[:-1], scale[:-1]
        return out, out_scale

    @staticmethod
    def linear_fp8(x: Tensor, weight: Fp8Weight) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=x.dtype)
        out[:-1] = ReferenceKernels.linear_fp8(x[:-1], weight)
        return out


@pytest.mark.parametrize("wrong", [WrongScale, OneNumber, Unwritten])
def test_what_is_wrong_is_seen(wrong: type) -> None:
    torch.manual_seed(0)
    assert not right(product_trial(wrong, 131, 128, 48, "cpu"))
    assert not right(quantise_trial(wrong, "quantize_rows", 131, 128, "cpu"))


def test_a_sum_beside_the_norm_is_looked_at() -> None:
    class Wrong(ReferenceKernels):
        @staticmethod
        def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
            return x, *ReferenceKernels.add_rms_norm(x, delta, weight, eps)[1:]

    assert not right(quantise_trial(Wrong, "add_rms_norm_fp8", 5, 40, "cpu"))


def test_without_such_products_the_rest_is_measured_and_it_is_said() -> None:
    told: list[str] = []
    results = Results("kernels", "cpu", None)
    ops = replace(kernels.reference_ops(), fp8=None)
    sizes = {"num_bytes": 1 << 12, "size": 16}
    kernels.run(results, "cpu", ops=ops, only=("swiglu", "swiglu_fp8"), ceiling_sizes=sizes, tell=told.append)
    assert {row["op"] for row in results.rows} == {"swiglu"}
    assert "8-bit floats" in results.data["without"]
    assert "8-bit floats" in told[0]


def test_the_memory_checker_runs_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with the references in the kernels' place."""
    monkeypatch.setattr(memcheck, "DEVICE", "cpu")
    monkeypatch.setattr(memcheck, "triton_ops", kernels.reference_ops)
    found = dict(memcheck.cases())
    assert set(OPS) <= set(found)
    assert all(found[op]() for op in OPS)


def test_cases_are_llada_8bs() -> None:
    found = list(kernels_fp8.cases(ReferenceKernels, "cpu"))
    assert len({case.name for case in found}) == len(found) == 28 + 12
    more = list(kernels_fp8.checks(ReferenceKernels, "cpu"))
    assert len({case.name for case in more}) == len(more) == 12 + 12
    assert sum(n * k for n, k in kernels_fp8.PRODUCTS.values()) * 32 == pytest.approx(0.87 * 8.0156e9, rel=0.01)
