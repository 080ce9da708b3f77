"""The Triton kernels that quantise against the reference, bit for bit where no sum is in between: in the interpreter on
the CPU, as compiled kernels where there is a GPU, where the library's product is looked at, too.

M rows, D row size
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.conftest import DEVICE, DTYPES, ON_GPU, compile_for_h200, load_kernels
from unmask.ops.reference import fp8 as reference
from unmask.ops.reference import mlp, norm

kernels = load_kernels("fp8")
pytestmark = pytest.mark.usefixtures("interpreted", "exact_conversion", "poisoned")
needs_fp8 = pytest.mark.skipif(
    not (ON_GPU and torch.cuda.get_device_capability() >= (8, 9)), reason="a GPU that multiplies 8-bit floats"
)

SHAPES = ((1, 1), (5, 37), (3, 64), (2, 3, 100), (0, 16))


@pytest.fixture
def exact_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter loses the carry when it rounds to 8 bits (127 becomes 64) and rounds ties up: torch's
    conversion in its place."""
    if ON_GPU:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(data, source, target, rounding)
        wide = torch.from_numpy(np.frombuffer(data.tobytes(), dtype=np.float32).copy())
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def exact(x: Tensor) -> tuple[Tensor, Tensor]:
    """The reference, row by row of any leading shape."""
    value_MD, scale_M = reference.quantize_rows(x.reshape(-1, x.shape[-1]))
    return value_MD.reshape(x.shape), scale_M.reshape(x.shape[:-1])


def equal(made: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert made[0].dtype == torch.float8_e4m3fn
    assert torch.equal(made[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(made[1], wanted[1])


def near(made: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """A sum in another order may move a value over the middle between two 8-bit ones: seldom, and by one step."""
    torch.testing.assert_close(made[1], wanted[1], rtol=1e-3, atol=0)
    steps = (made[0].float().abs() - wanted[0].float().abs()).abs()
    assert steps.le(wanted[0].float().abs() / 8 + 2.0**-9).all()
    assert steps.gt(0).sum() <= 0.02 * steps.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    equal(kernels.quantize_rows(x), exact(x))


@pytest.mark.parametrize("size", [0.0, 1e-35, 1e-3, 3e4])
def test_rows_of_any_size(size: float) -> None:
    x = random(4, 40, dtype=torch.float32) * size
    x[2] = 0
    equal(kernels.quantize_rows(x), exact(x))


def test_rows_that_are_part_of_wider_ones() -> None:
    x = random(6, 80, dtype=torch.float32)[::2, :37]
    equal(kernels.quantize_rows(x), exact(x))
    equal(kernels.quantize_rows(x.T), exact(x.T))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_behind_a_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    near(kernels.rms_norm(x, weight, 1e-5), exact(norm.rms_norm(x, weight, 1e-5)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_behind_a_sum_and_a_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, delta = (random(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = random(shape[-1], dtype=dtype, seed=2)
    total, *made = kernels.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    near(tuple(made), exact(norm.rms_norm(x + delta, weight, 1e-5)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_behind_the_gated_activation(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype)
    near(kernels.swiglu(x), exact(mlp.swiglu(x)))


def test_what_is_taken() -> None:
    assert kernels.supported(torch.zeros(2, 8))
    assert not kernels.supported(torch.zeros(2, 8, dtype=torch.float64))
    assert not kernels.supported(torch.zeros(2, 0))
    assert not kernels.supported(torch.zeros(1, kernels.MOST_COLUMNS + 1))
    on_cpu = reference.Fp8Weight.quantize(torch.zeros(16, 16))
    assert not kernels.product_supported(torch.bfloat16, on_cpu)
    assert kernels.product(*reference.quantize_rows(torch.zeros(0, 16)), on_cpu, None).shape == (0, 16)


@pytest.mark.skipif(ON_GPU, reason="below, with the kernels")
@pytest.mark.parametrize("leading", [(1,), (17,), (2, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_where_the_cpu_has_it(leading: tuple[int, ...], biased: bool) -> None:
    """How the library is called: shapes, layouts, scales and bias. torch 2.13's CPU multiplies, older ones do not."""
    x = random(*leading, 64, dtype=torch.bfloat16)
    weight = reference.Fp8Weight.quantize(random(32, 64, dtype=torch.bfloat16, seed=1))
    bias = random(32, dtype=torch.bfloat16, seed=2) if biased else None
    try:
        out = kernels.product(*exact(x), weight, bias)
    except RuntimeError as error:
        pytest.skip(str(error))
    wanted = reference.linear_fp8(x, weight, bias)
    assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype)
    assert (out.float() - wanted.float()).norm() <= 5e-3 * wanted.float().norm()


@needs_fp8
@pytest.mark.parametrize("shape", [(1, 4096, 12288), (17, 4096, 4096), (128, 12288, 4096), (1000, 320, 960)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_on_a_gpu(shape: tuple[int, int, int], biased: bool) -> None:
    rows, size, channels = shape
    x = random(rows, size, dtype=torch.bfloat16)
    weight = reference.Fp8Weight.quantize(random(channels, size, dtype=torch.bfloat16, seed=1) * 0.02)
    bias = random(channels, dtype=torch.bfloat16, seed=2) if biased else None
    assert kernels.product_supported(x.dtype, weight)
    out, wanted = kernels.linear_fp8(x, weight, bias).float(), reference.linear_fp8(x, weight, bias).float()
    assert (out - wanted).norm() <= 5e-3 * wanted.norm()


@needs_fp8
def test_what_the_library_does_not_multiply() -> None:
    odd = reference.Fp8Weight.quantize(random(24, 16, dtype=torch.bfloat16))
    assert not kernels.product_supported(torch.bfloat16, odd)
    assert not kernels.product_supported(
        torch.float32, reference.Fp8Weight.quantize(random(16, 16, dtype=torch.float32))
    )


CALLS = """
from unmask.ops.triton import fp8 as kernels
for rows, size in ((1, 1), (4, 320), (4, 4096), (4, 3584)):
    x, weight = torch.zeros(rows, size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
    kernels.quantize_rows(x)
    kernels.rms_norm(x, weight, 1e-5, pdl=True)
    kernels.add_rms_norm(x, x, weight, 1e-5, pdl=True)
for size in (1, 832, 12288, 18944):
    kernels.swiglu(torch.zeros(4, 2 * size, dtype=torch.bfloat16), pdl=True)
"""


def test_they_compile_for_an_h200() -> None:
    """Rows of the models are read and written 16 bytes at a time, and the processor converts."""
    found = compile_for_h200(CALLS)
    assert [name for name, *_ in found] == ["_norm_fp8_kernel"] * 12 + ["_swiglu_fp8_kernel"] * 4
    assert all("cvt.rn.satfinite.e4m3x2.f32" in ptx for *_, ptx in found)
    for *_, ptx in (*found[3:12], *found[13:]):
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
