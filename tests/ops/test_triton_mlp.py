"""The Triton kernel of `swiglu` against the reference: in the interpreter on the CPU, compiled where there is a GPU.

M rows, F MLP size
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.conftest import DEVICE, DTYPES, compile_for_h200, load_kernels
from unmask.ops.reference import mlp as reference

kernels = load_kernels("mlp")
pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE, dtype)


def near(ours: Tensor, exact: Tensor) -> None:
    """Another exponential moves silu by some 2^-23: in half precision, few numbers then round otherwise."""
    assert ours.dtype == exact.dtype
    assert ours.shape == exact.shape
    if exact.dtype == torch.float32:
        torch.testing.assert_close(ours, exact, rtol=2e-6, atol=1e-30)
    else:
        smallest = torch.finfo(exact.dtype).smallest_normal
        torch.testing.assert_close(ours, exact, rtol=8 * torch.finfo(exact.dtype).eps, atol=smallest)
        assert same(ours, exact) > 0.98


def same(ours: Tensor, exact: Tensor) -> float:
    return ours.eq(exact).float().mean().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (1, 1024), (2, 1025), (127, 127), (129, 1023), (2, 9472), (3, 2049), (1, 1536)]
)
def test_it_is_the_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    """Sizes below, at and beyond a program's columns, odd ones, too."""
    x = randn(rows, 2 * size, dtype=dtype)
    near(kernels.swiglu(x), reference.swiglu(x))


def test_every_cut_is_the_reference() -> None:
    x = randn(5, 2 * 333)
    for columns in (16, 128, 512):
        near(kernels.swiglu(x, columns=columns, num_warps=1), reference.swiglu(x))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_it_is_rounded_where_the_reference_rounds(dtype: torch.dtype) -> None:
    """Before silu meets up. Negative control: after it is seen."""
    x = randn(64, 896, dtype=dtype)
    ours, late = kernels.swiglu(x), reference.swiglu(x.float()).to(dtype)
    assert same(ours, reference.swiglu(x)) > 0.98 > 0.9 > same(ours, late)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's word on what a GPU does in silence
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_any_size(dtype: torch.dtype) -> None:
    """The exponential overflows to infinity, and the quotient is 0."""
    gate = torch.tensor([0.0, -0.0, 1e-7, -20.0, 20.0, -200.0, 200.0, -6e4, 6e4])
    x = torch.cat((gate, torch.ones(9))).expand(2, 18).to(DEVICE, dtype)
    near(kernels.swiglu(x), reference.swiglu(x))


def test_rows_may_lie_anywhere() -> None:
    wide = randn(10, 130)
    for x in (wide[::2, :66], wide[:5, 3:69], randn(66, 5).T, randn(66).expand(5, 66), randn(5, 132)[:, ::2]):
        ours = kernels.swiglu(x)
        near(ours, reference.swiglu(x))
        assert ours.is_contiguous()


def test_any_number_of_dimensions() -> None:
    for shape in ((66,), (2, 3, 66), (2, 1, 3, 66)):
        x = randn(*shape)
        near(kernels.swiglu(x), reference.swiglu(x))


def test_no_rows() -> None:
    assert kernels.swiglu(randn(0, 66)).shape == (0, 33)
    assert kernels.swiglu(randn(2, 0, 66)).shape == (2, 0, 33)


def test_both_halves_are_read() -> None:
    """Negative control."""
    x = randn(3, 66)
    with pytest.raises(AssertionError, match="not close"):
        near(kernels.swiglu(x.roll(33, 1)), reference.swiglu(x))
    with pytest.raises(AssertionError, match="not close"):
        near(kernels.swiglu(x.roll(1, 0)), reference.swiglu(x))


def test_what_the_kernel_takes() -> None:
    x = randn(3, 66)
    assert kernels.supported(x)
    assert kernels.supported(x.bfloat16())
    assert not kernels.supported(x.double())
    assert not kernels.supported(x.int())
    assert not kernels.supported(x[:, :65])
    assert not kernels.supported(x[:, :0])
    x.requires_grad_()
    assert not kernels.supported(x)
    with torch.no_grad():
        assert kernels.supported(x)


CALLS = """
from unmask.ops.triton import mlp
for rows, size in ((1, 1), (1, 12288), (128, 18944), (128, 12288), (3, 127)):
    for pdl in (False, True):
        mlp.swiglu(torch.zeros(rows, 2 * size, dtype=torch.bfloat16), pdl=pdl)
"""


def test_it_compiles_for_an_h200() -> None:
    """Rows of the models are read 16 bytes at a time."""
    found = compile_for_h200(CALLS)
    assert [name for name, *_ in found] == ["_swiglu_kernel"] * 10
    assert all("ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx for *_, ptx in found[2:8])
    assert ["griddepcontrol.wait" in ptx for *_, ptx in found] == [False, True] * 5
