"""Which implementation runs: by device, types and shapes, and by what the process was told; never by values."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask import ops
from unmask.errors import ConfigError
from unmask.ops import dispatch
from unmask.ops.reference.fp8 import Fp8Rows, Fp8Weight


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    dispatch._why_not.cache_clear()
    yield
    dispatch._why_not.cache_clear()


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), triton: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)  # noqa: ARG005


def test_no_gpu_no_kernel() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert dispatch.kernel("norm", torch.zeros(2)) is None
    assert "no NVIDIA GPU" in (dispatch.why_not() or "")


@pytest.mark.parametrize(
    ("pretend", "reason"),
    [({"capability": (7, 5)}, "7.5"), ({"triton": False}, r"pip install 'unmask\[gpu\]'"), ({}, None)],
)
def test_what_is_missing_is_named(pretend: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, **pretend)
    if reason is None:
        ops.check_kernels("triton")
        return
    with pytest.raises(ConfigError, match=reason), ops.kernels("triton"):
        pass


def test_an_unknown_choice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="reference"), ops.kernels("referense"):
        pass


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def on_gpu(*size: int, requires_grad: bool = False) -> Any:
    return torch.zeros(size).as_subclass(OnGpu).requires_grad_(requires_grad)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are named, not imported."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(importlib, "import_module", lambda name: name)


@pytest.mark.usefixtures("named")
def test_the_choice_holds_inside_and_ends() -> None:
    x = on_gpu(2)
    assert dispatch.kernel("norm", x) == "unmask.ops.triton.norm"
    with ops.kernels("reference"):
        assert dispatch.kernel("norm", x) is None
        with ops.kernels("triton"):
            assert dispatch.kernel("norm", x)
        assert dispatch.kernel("norm", x) is None
    assert dispatch.kernel("norm", x)


@pytest.mark.usefixtures("named")
def test_what_wants_a_gradient_goes_to_the_reference() -> None:
    x, wants = on_gpu(2), on_gpu(2, requires_grad=True)
    assert dispatch.kernel("norm", x, wants) is None
    with torch.no_grad():
        assert dispatch.kernel("norm", x, wants)


class OnGpu1(OnGpu):
    device = torch.device("cuda", 1)  # type: ignore[assignment]


@pytest.mark.usefixtures("named")
def test_a_tensors_own_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current one, whatever was asked before; and each but once."""
    asked: list[torch.device | None] = []

    def capability(device: torch.device | None = None) -> tuple[int, int]:
        asked.append(device)
        return (7, 5) if device is not None and device.index == 1 else (9, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    for _ in range(2):
        assert dispatch.kernel("norm", on_gpu(2)) is not None
        assert dispatch.kernel("norm", torch.zeros(2).as_subclass(OnGpu1)) is None
    assert [each.index for each in asked if each is not None] == [None, 1]
    ops.check_kernels("triton")  # where nobody names one, the current, anew each time
    ops.check_kernels("triton")
    assert asked[2:] == [None, None]


def test_a_gpu_is_the_current_one_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    with ops.on(torch.device("cpu")):
        pass
    assert not entered
    with ops.on(torch.device("cuda", 1)):
        pass
    assert entered == [torch.device("cuda", 1)]


def taken(name: str, calls: list[str], **functions: Any) -> Any:
    """A module of kernels that says which of its functions ran."""

    def noting(function: str, result: Any) -> Any:
        return lambda *_, **__: calls.append(f"{name}.{function}") or result

    return SimpleNamespace(**{function: noting(function, result) for function, result in functions.items()})


@pytest.mark.parametrize("takes", [True, False])
def test_a_kernel_runs_where_it_takes_the_call(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    x, gain = torch.ones(3, 4), torch.ones(4)
    fast = taken("norm", calls, supported=takes, rms_norm=x, add_rms_norm=(x, x))
    monkeypatch.setattr(ops, "kernel", lambda name, *_: fast if name == "norm" else None)
    assert torch.allclose(ops.rms_norm(x, gain, 0.0), x)
    ops.add_rms_norm(x, x, gain, 0.0)
    ran = [call for call in calls if not call.endswith("supported")]
    assert ran == (["norm.rms_norm", "norm.add_rms_norm"] if takes else [])


def test_products_in_8_bits_take_rows_in_8_bits() -> None:
    """Quantised where they are made or on the fly: the same."""
    torch.manual_seed(0)
    x, weight, gain = torch.randn(5, 32), Fp8Weight.quantize(torch.randn(48, 32)), torch.rand(32)
    rows = ops.rms_norm(x, gain, 1e-5, fp8=True)
    assert isinstance(rows, Fp8Rows)
    assert torch.equal(ops.linear(rows, weight), ops.linear(ops.rms_norm(x, gain, 1e-5), weight))
    total, rows = ops.add_rms_norm(x, x, gain, 1e-5, fp8=True)
    assert torch.equal(total, x + x)
    assert torch.equal(ops.linear(rows, weight), ops.linear(ops.rms_norm(x + x, gain, 1e-5), weight))
    gate_up = torch.randn(5, 64)
    assert torch.equal(ops.linear(ops.swiglu(gate_up, fp8=True), weight), ops.linear(ops.swiglu(gate_up), weight))


def test_the_gated_product_is_its_parts() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 32), torch.randn(48, 32)
    assert torch.equal(ops.linear_swiglu(x, weight), ops.swiglu(ops.linear(x, weight)))
    assert not torch.equal(ops.linear_swiglu(x, weight.flip(0)), ops.swiglu(ops.linear(x, weight)))
