"""The benchmark of 8-bit products, with the reference in the kernels' place: it says what is right and what is not."""

from __future__ import annotations

import pytest
import torch

from unmask.bench import kernels_fp8
from unmask.bench.floor import Ceilings
from unmask.bench.kernels_fp8 import ReferenceKernels, product_trial, quantise_trial
from unmask.bench.trial import Case, check, measure

CEILINGS = Ceilings(1e10, 1e10)


def test_products_and_rows() -> None:
    trials = [product_trial(ReferenceKernels, 3, 32, 48, "cpu")]
    ops = ("quantize_rows", "rms_norm", "add_rms_norm", "swiglu")
    trials += [quantise_trial(ReferenceKernels, op, 5, 40, "cpu") for op in ops]
    for trial in trials:
        row = measure(Case("op", {}, lambda trial=trial: trial), trial, "cpu", CEILINGS, trusted=True)
        assert row["ok"], row
        assert row["speedup"]


def test_a_wrong_scale_is_seen() -> None:
    class Wrong(ReferenceKernels):
        @staticmethod
        def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            value, scale = ReferenceKernels.quantize_rows(x)
            return value, scale * 1.01

        @staticmethod
        def linear_fp8(x: torch.Tensor, weight: kernels_fp8.Fp8Weight) -> torch.Tensor:
            return ReferenceKernels.product(*Wrong.quantize_rows(x), weight, None)

    for trial in (product_trial(Wrong, 3, 32, 48, "cpu"), quantise_trial(Wrong, "quantize_rows", 5, 40, "cpu")):
        assert not check(Case("op", {}, lambda trial=trial: trial), trial)["ok"]


def test_cases_are_llada_8bs() -> None:
    found = list(kernels_fp8.cases(ReferenceKernels, "cpu"))
    assert len({case.name for case in found}) == len(found) == 28 + 36
    assert sum(n * k for n, k in kernels_fp8.PRODUCTS.values()) * 32 == pytest.approx(0.87 * 8.0156e9, rel=0.01)
