"""The Triton kernel of `rms_norm` and `add_rms_norm` against the reference: interpreted on the CPU, compiled where
there is a GPU.

M rows, D row size
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.conftest import DEVICE, DTYPES, compile_for_h200, load_kernels
from unmask.ops.reference import norm as reference

kernels = load_kernels("norm")
pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")

EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(ours: Tensor, exact: Tensor) -> None:
    """A sum in another order moves the scale by some 2^-23: in half precision, few numbers then round otherwise."""
    assert ours.dtype == exact.dtype
    assert ours.shape == exact.shape
    step = 8 * torch.finfo(exact.dtype).eps
    torch.testing.assert_close(ours, exact, rtol=2e-6 if exact.dtype == torch.float32 else step, atol=0)
    if exact.dtype != torch.float32 and exact.numel() > 1000:
        assert same(ours, exact) > 0.98


def same(ours: Tensor, exact: Tensor) -> float:
    return ours.eq(exact).float().mean().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 448), (1, 1), (2, 3584), (127, 448), (129, 127), (3, 4096)])
def test_the_norm_is_the_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    near(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 448), (2, 3584), (127, 65), (129, 448)])
def test_the_sum_is_exact_and_its_norm_the_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    x, delta, weight = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype, seed=1), randn(size, dtype=dtype)
    total, normed = kernels.add_rms_norm(x, delta, weight, EPS)
    exact_total, exact = reference.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, exact_total)
    near(normed, exact)


def test_every_number_of_warps_is_the_reference() -> None:
    x, weight = randn(3, 448), randn(448, seed=1)
    for num_warps in (1, 16):
        near(kernels.rms_norm(x, weight, EPS, num_warps=num_warps), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_it_is_rounded_where_the_reference_rounds(dtype: torch.dtype) -> None:
    """Before the gain, and after the sum. Negative control: later, or not at all, is seen."""
    x, delta, weight = randn(64, 448, dtype=dtype), randn(64, 448, dtype=dtype, seed=1), randn(448, dtype=dtype, seed=2)
    normed = kernels.rms_norm(x, weight, EPS)
    late = reference.rms_norm(x.float(), weight.float(), EPS).to(dtype)
    assert same(normed, reference.rms_norm(x, weight, EPS)) > 0.98 > 0.9 > same(normed, late)
    _, normed = kernels.add_rms_norm(x, delta, weight, EPS)
    wide = x.float() + delta.float()
    never = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(dtype) * weight
    assert same(normed, reference.add_rms_norm(x, delta, weight, EPS)[1]) > 0.98 > 0.9 > same(normed, never)


def test_squares_are_summed_in_fp32() -> None:
    x = torch.full((2, 448), 1e4, dtype=torch.float16, device=DEVICE)  # 1e8 is beyond fp16
    ones = torch.ones(448, dtype=torch.float16, device=DEVICE)
    assert torch.equal(kernels.rms_norm(x, ones, EPS), torch.ones_like(x))


def test_a_row_of_zeros_is_zero() -> None:
    x, weight = torch.zeros(2, 65, device=DEVICE), randn(65)
    assert not kernels.rms_norm(x, weight, EPS).any()
    x[0] = 1e-4  # below the root of eps
    near(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


def test_rows_may_lie_anywhere() -> None:
    """Every second one, part of a wider one, transposed, the same one again; the results are dense."""
    weight, delta = randn(48, seed=1), randn(5, 48, seed=2)
    wide = randn(10, 130)
    for x in (wide[::2, :48], wide[:5, 3:51], randn(48, 5).T, randn(48).expand(5, 48), randn(5, 96)[:, ::2]):
        near(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
        for first, second in ((x, delta), (delta, x), (x, x)):
            total, normed = kernels.add_rms_norm(first, second, weight, EPS)
            assert torch.equal(total, first + second)
            near(normed, reference.rms_norm(first + second, weight, EPS))
            assert total.is_contiguous()
            assert normed.is_contiguous()
    gain = randn(96)[::2]
    near(kernels.rms_norm(delta, gain, EPS), reference.rms_norm(delta, gain, EPS))


def test_any_number_of_dimensions() -> None:
    weight = randn(33, seed=1)
    for shape in ((33,), (2, 3, 33), (2, 1, 3, 33)):
        x = randn(*shape)
        near(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    x = randn(4, 6, 33)[:, 1:3]
    near(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


def test_no_rows() -> None:
    x, weight = randn(0, 33), randn(33)
    assert kernels.rms_norm(x, weight, EPS).shape == (0, 33)
    assert [each.shape for each in kernels.add_rms_norm(x, x, weight, EPS)] == [(0, 33)] * 2


def test_the_inputs_stay_as_they_are() -> None:
    x, delta, weight = randn(5, 48), randn(5, 48, seed=1), randn(48, seed=2)
    before = [each.clone() for each in (x, delta, weight)]
    kernels.add_rms_norm(x, delta, weight, EPS)
    assert all(torch.equal(now, then) for now, then in zip((x, delta, weight), before))


@pytest.mark.parametrize("change", ["x", "delta", "weight", "eps"])
def test_the_kernel_reads_every_argument(change: str) -> None:
    """Negative control."""
    said = {"x": randn(5, 48), "delta": randn(5, 48, seed=1), "weight": randn(48, seed=2), "eps": EPS}
    _, exact = reference.add_rms_norm(**said)  # type: ignore[arg-type]
    said[change] = 1e-3 if change == "eps" else said[change].flip(0)  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="not close"):
        near(kernels.add_rms_norm(**said)[1], exact)


def test_what_the_kernels_take() -> None:
    x, weight = randn(3, 48), randn(48)
    assert kernels.supported(x, weight)
    assert kernels.supported(x, weight, x)
    assert kernels.supported(x.bfloat16(), weight.bfloat16(), x.bfloat16())
    assert not kernels.supported(x.double(), weight.double())
    assert not kernels.supported(x.half(), weight)
    assert not kernels.supported(x, weight.bfloat16())
    assert not kernels.supported(x, weight, x.half())
    assert not kernels.supported(x, weight, x[:1])
    assert not kernels.supported(x, weight[:1])
    assert not kernels.supported(x[:, :0], weight[:0])
    most = kernels.MAX_SIZE
    assert kernels.supported(x.new_zeros(1, most), x.new_zeros(most))
    assert not kernels.supported(x.new_zeros(1, most + 1), x.new_zeros(most + 1))


def test_no_gradient_is_lost() -> None:
    x, weight = randn(3, 48), randn(48)
    for at in range(3):
        tensors = [x.clone(), weight.clone(), x.clone()]
        tensors[at].requires_grad_()
        assert not kernels.supported(*tensors)
        with torch.no_grad():
            assert kernels.supported(*tensors)


CALLS = """
from unmask.ops.triton import norm
for rows, size in ((1, 1), (1, 4096), (128, 3584), (128, 4096), (3, 127), (2, 16384)):
    x, weight = torch.zeros(rows, size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
    for pdl in (False, True):
        norm.rms_norm(x, weight, 1e-5, pdl=pdl)
        norm.add_rms_norm(x, x, weight, 1e-5, pdl=pdl)
"""


def test_it_compiles_for_an_h200() -> None:
    """Rows of the models are read 16 bytes at a time."""
    found = compile_for_h200(CALLS)
    assert [name for name, *_ in found] == ["_norm_kernel"] * 24
    assert all("ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx for _, _, ptx in found[4:16])
    assert ["griddepcontrol.wait" in ptx for *_, ptx in found] == [False, False, True, True] * 6
