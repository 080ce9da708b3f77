"""8-bit products against fp32: errors within what 3 bits of mantissa leave, channel by channel and row by row.

M rows, D input size, N output channels
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.ops.reference.fp8 import LARGEST, Fp8Weight, linear_fp8, quantize_rows

HALF_STEP = 2.0**-4
"""Largest error of rounding to 3 bits of mantissa, of the value itself."""
SUBNORMAL = 2.0**-10
"""Largest error below 2^-6, in units of the scale."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error_bound(x_MD: Tensor, scale_M: Tensor) -> Tensor:
    return HALF_STEP * x_MD.abs() + SUBNORMAL * scale_M[:, None] * 1.0001


def close(out_MN: Tensor, x_MD: Tensor, weight_ND: Tensor) -> None:
    """Each product x * w is off by the relative error of both, so a sum by at most that share of its terms' sizes."""
    exact_MN, sizes_MN = x_MD @ weight_ND.T, x_MD.abs() @ weight_ND.abs().T
    small_MN = x_MD.abs().amax(1)[:, None] * weight_ND.abs().amax(1) * x_MD.shape[1] * 2 * SUBNORMAL / LARGEST
    assert (out_MN - exact_MN).abs().le((2 * HALF_STEP + HALF_STEP**2) * sizes_MN + small_MN + 1e-6).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 37), (2, 4096), (0, 8), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_come_back_within_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x_MD = random(*shape).to(dtype)
    value_MD, scale_M = quantize_rows(x_MD)
    assert value_MD.dtype == torch.float8_e4m3fn
    assert (value_MD.shape, scale_M.shape, scale_M.dtype) == (x_MD.shape, x_MD.shape[:1], torch.float32)
    error_MD = (value_MD.float() * scale_M[:, None] - x_MD.float()).abs()
    assert error_MD.le(error_bound(x_MD.float(), scale_M)).all()
    if x_MD.numel():
        assert value_MD.float().abs().amax(1).eq(LARGEST).all()


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e-3, 1.0, 1e6, 1e38])
def test_no_size_overflows(size: float) -> None:
    value_MD, scale_M = quantize_rows(random(200, 50).clamp(-3, 3) * size)
    assert value_MD.float().isfinite().all()
    assert scale_M.isfinite().all()


def test_rows_of_zeros_stay_zeros() -> None:
    x_MD = random(4, 32)
    x_MD[1] = 0
    weight = Fp8Weight.quantize(random(16, 32, seed=1))
    value_MD, scale_M = quantize_rows(x_MD)
    assert value_MD[1].float().eq(0).all()
    assert scale_M.gt(0).all()
    assert linear_fp8(x_MD, weight)[1].eq(0).all()
    assert linear_fp8(x_MD, weight, torch.ones(16))[1].eq(1).all()
    assert Fp8Weight.quantize(torch.zeros(3, 8)).dequantize().eq(0).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 320, 960), (5, 37, 3), (2, 48, 100)])
def test_the_product_is_near_the_exact_one(shape: tuple[int, int, int]) -> None:
    rows, size, channels = shape
    x_MD, weight_ND = random(rows, size), random(channels, size, seed=1) * 0.02
    close(linear_fp8(x_MD, Fp8Weight.quantize(weight_ND)), x_MD, weight_ND)


def test_it_is_the_product_of_the_quantised_values() -> None:
    x_MD, weight_ND, bias_N = random(6, 64), random(10, 64, seed=1), random(10, seed=2)
    weight, (value_MD, scale_M) = Fp8Weight.quantize(weight_ND), quantize_rows(x_MD)
    exact_MN = (value_MD.double() * scale_M[:, None].double()) @ weight.dequantize().double().T + bias_N.double()
    torch.testing.assert_close(linear_fp8(x_MD, weight, bias_N).double(), exact_MN, rtol=1e-5, atol=1e-5)


def test_a_large_channel_does_not_hurt_the_others() -> None:
    x_MD, weight_ND = random(5, 64), random(8, 64, seed=1)
    before = linear_fp8(x_MD, Fp8Weight.quantize(weight_ND))
    weight_ND[3] *= 1000
    after = linear_fp8(x_MD, Fp8Weight.quantize(weight_ND))
    others = [n for n in range(8) if n != 3]
    assert torch.equal(before[:, others], after[:, others])
    close(after, x_MD, weight_ND)

    # With one scale for all, the same weight is no longer within the bound: the test above would see it.
    one = weight_ND.abs().amax() / LARGEST
    tensorwise = Fp8Weight((weight_ND / one).to(torch.float8_e4m3fn), one.expand(8))
    error_ND = (tensorwise.dequantize() - weight_ND).abs()[others]
    assert not error_ND.le(error_bound(weight_ND[others], Fp8Weight.quantize(weight_ND).scale_N[others])).all()


def test_a_row_does_not_know_its_neighbours() -> None:
    x_MD, weight = random(4, 64), Fp8Weight.quantize(random(8, 64, seed=1))
    before = linear_fp8(x_MD, weight)
    x_MD[2] *= 1e4
    after = linear_fp8(x_MD, weight)
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_leading_dimensions_and_dtype_stay(dtype: torch.dtype) -> None:
    x, weight = random(2, 3, 32).to(dtype), Fp8Weight.quantize(random(8, 32, seed=1))
    out = linear_fp8(x, weight, random(8, seed=2).to(dtype))
    assert (out.shape, out.dtype) == ((2, 3, 8), dtype)
    assert linear_fp8(x[:0], weight).shape == (0, 3, 8)


def test_torchs_linear_takes_the_weight_and_nothing_else_does() -> None:
    x_MD, weight, bias_N = random(3, 32), Fp8Weight.quantize(random(8, 32, seed=1)), random(8)
    assert torch.equal(F.linear(x_MD, weight, bias_N), linear_fp8(x_MD, weight, bias_N))  # type: ignore[arg-type]
    assert torch.equal(F.linear(x_MD, weight, bias=bias_N), linear_fp8(x_MD, weight, bias_N))  # type: ignore[arg-type]
    for wrong in (lambda: torch.matmul(x_MD, weight), lambda: F.linear(weight, x_MD)):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            wrong()
