"""Every tensor operation that has more than one implementation; the only door to them.

The plain-torch versions in `reference/` define what an operation means. They run anywhere, in any float dtype, and a
faster version must match them. `dispatch` says which one runs: on a GPU a Triton kernel where there is one that takes
the call; `kernels("reference")` forbids them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unmask.ops.dispatch import check as check_kernels
from unmask.ops.dispatch import kernel, kernels, on
from unmask.ops.reference import attend as _attend
from unmask.ops.reference import drift as _drift
from unmask.ops.reference import linear as _linear
from unmask.ops.reference import logit_stats as _logit_stats
from unmask.ops.reference import mlp as _mlp
from unmask.ops.reference import norm as _norm
from unmask.ops.reference import project as _project
from unmask.ops.reference.attend import MassSum, Sight
from unmask.ops.reference.attention import attention
from unmask.ops.reference.drift import Picked, cosine_drift
from unmask.ops.reference.fp8 import Fp8Rows, Fp8Weight
from unmask.ops.reference.logit_stats import LogitStats, Sampling
from unmask.ops.reference.rope import rope

Rows = Tensor | Fp8Rows
"""Rows as a product takes them."""
Weight = Tensor | Fp8Weight

__all__ = [
    "Fp8Rows",
    "Fp8Weight",
    "LogitStats",
    "MassSum",
    "Picked",
    "Rows",
    "Sampling",
    "Sight",
    "Weight",
    "add_rms_norm",
    "attend",
    "attention",
    "check_kernels",
    "cosine_drift",
    "drift",
    "furthest",
    "kernels",
    "linear",
    "linear_swiglu",
    "logit_stats",
    "on",
    "picked",
    "project_and_store",
    "rms_norm",
    "rope",
    "swiglu",
    "tracking_mass",
]


def linear(x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`."""
    if isinstance(weight, Fp8Weight):
        fast = _fp8_kernels(x, weight)
        return fast.linear_fp8(x, weight, bias) if fast else _linear.linear(x, weight, bias)
    return _linear.linear(x, weight, bias)


def linear_swiglu(x: Rows, weight: Weight, *, fp8: bool = False) -> Rows:
    """See `reference.linear`; with ``fp8`` the result is for a product in 8 bits."""
    if not fp8 and isinstance(x, Tensor) and isinstance(weight, Tensor):
        fast = kernel("linear", x, weight)
        if fast and (tile := fast.faster_gated(x, weight)):
            return fast.linear_swiglu(x, weight, tile=tile)  # type: ignore[no-any-return]
    return swiglu(linear(x, weight), fp8=fp8)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, fp8: bool = False) -> Rows:
    """See `reference.norm`; with ``fp8`` the result is for a product in 8 bits."""
    if fp8:
        fast = kernel("fp8", x, weight)
        if fast and fast.supported(x):
            value, scale = fast.rms_norm(x, weight, eps)
            return Fp8Rows(value, scale, x.dtype)
        return Fp8Rows.quantize(_norm.rms_norm(x, weight, eps))
    fast = kernel("norm", x, weight)
    way: Any = fast if fast and fast.supported(x, weight) else _norm
    return way.rms_norm(x, weight, eps)  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, fp8: bool = False) -> tuple[Tensor, Rows]:
    """See `reference.norm`; with ``fp8`` the norm is for a product in 8 bits."""
    if fp8:
        fast = kernel("fp8", x, delta, weight)
        if fast and fast.supported(x) and x.dtype == delta.dtype == weight.dtype:
            total, value, scale = fast.add_rms_norm(x, delta, weight, eps)
            return total, Fp8Rows(value, scale, x.dtype)
        total, normed = _norm.add_rms_norm(x, delta, weight, eps)
        return total, Fp8Rows.quantize(normed)
    fast = kernel("norm", x, delta, weight)
    way: Any = fast if fast and fast.supported(x, weight, delta) else _norm
    return way.add_rms_norm(x, delta, weight, eps)  # type: ignore[no-any-return]


def swiglu(gate_up: Tensor, *, fp8: bool = False) -> Rows:
    """See `reference.mlp`; with ``fp8`` the result is for a product in 8 bits."""
    if fp8:
        fast = kernel("fp8", gate_up)
        if fast and fast.supported(gate_up[..., : gate_up.shape[-1] // 2]):
            value, scale = fast.swiglu(gate_up)
            return Fp8Rows(value, scale, gate_up.dtype)
        return Fp8Rows.quantize(_mlp.swiglu(gate_up))
    fast = kernel("mlp", gate_up)
    way: Any = fast if fast and fast.supported(gate_up) else _mlp
    return way.swiglu(gate_up)  # type: ignore[no-any-return]


def _fp8_kernels(x: Rows, weight: Fp8Weight) -> Any:
    """Kernels for this product in 8 bits; None: the reference."""
    fast = kernel("fp8", x.value if isinstance(x, Fp8Rows) else x)
    takes_rows = fast and (isinstance(x, Fp8Rows) or fast.supported(x))
    return fast if takes_rows and fast.product_supported(x.dtype, weight) else None


def project_and_store(
    hidden_MD: Rows,
    weight: Weight,
    bias: Tensor | None,
    cos_M: Tensor,
    sin_M: Tensor,
    write_M: Tensor,
    k_E: Tensor,
    v_E: Tensor,
) -> Tensor:
    """See `reference.project`."""
    rest = (cos_M, sin_M, write_M, k_E, v_E)
    fast = kernel("project", k_E)
    if isinstance(hidden_MD, Tensor) and isinstance(weight, Tensor):
        if fast and kernel("project", hidden_MD, weight) and fast.supported(hidden_MD, k_E, v_E):
            return fast.project_and_store(hidden_MD, weight, bias, *rest)  # type: ignore[no-any-return]
    elif fast:
        qkv_M = linear(hidden_MD, weight, bias)
        if fast.supported(qkv_M, k_E, v_E):
            return fast.rotate_and_store(qkv_M, *rest)  # type: ignore[no-any-return]
    return _project.project_and_store(hidden_MD, weight, bias, *rest)


def attend(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Sight, mass: MassSum | None = None) -> Tensor:
    """See `reference.attend`."""
    fast = kernel("attend", q_M)
    way: Any = fast if fast and fast.supported(q_M, k_E, v_E) else _attend
    return way.attend(q_M, k_E, v_E, sight, mass)  # type: ignore[no-any-return]


def tracking_mass(q_M: Tensor, k_E: Tensor, sight: Sight, counts_M: Tensor, *, softmax: bool = False) -> Tensor:
    """See `reference.attend`."""
    fast = kernel("attend", q_M)
    way: Any = fast if fast and fast.supported(q_M, k_E, k_E) else _attend
    return way.tracking_mass(q_M, k_E, sight, counts_M, softmax=softmax)  # type: ignore[no-any-return]


def drift(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor | None = None) -> Tensor:
    """See `reference.drift`."""
    fast = kernel("drift", new_MR)
    way: Any = fast if fast and fast.supported(new_MR, kept_ER) else _drift
    return way.drift(new_MR, kept_ER, at_M, keep_M)  # type: ignore[no-any-return]


def furthest(
    drift_M: Tensor,
    optional_M: Tensor,
    seat_M: Tensor,
    first_S: Tensor,
    count_S: Tensor,
    must_M: Tensor | None = None,
) -> Tensor:
    """See `reference.drift`."""
    way: Any = kernel("drift", drift_M) or _drift
    return way.furthest(drift_M, optional_M, seat_M, first_S, count_S, must_M)  # type: ignore[no-any-return]


def picked(chosen_M: Tensor, per_seat: int, most: int, write_M: Tensor, see_M: Tensor) -> Picked:
    """See `reference.drift`."""
    way: Any = kernel("drift", chosen_M) or _drift
    return way.picked(chosen_M, per_seat, most, write_M, see_M)  # type: ignore[no-any-return]


def logit_stats(
    hidden_CD: Tensor,
    head_VD: Tensor,
    *,
    banned_b: Tensor | None = None,
    ban_argmax_CB: Tensor | None = None,
    ban_softmax_CB: Tensor | None = None,
    sampling: Sampling | None = None,
    margin: bool = False,
    entropy: bool = False,
    ask_C: Tensor | None = None,
) -> LogitStats:
    """See `reference.logit_stats`."""
    fast = kernel("logit_stats", hidden_CD, head_VD)
    way: Any = fast if fast and fast.supported(hidden_CD, head_VD) else _logit_stats
    return way.logit_stats(  # type: ignore[no-any-return]
        hidden_CD,
        head_VD,
        banned_b=banned_b,
        ban_argmax_CB=ban_argmax_CB,
        ban_softmax_CB=ban_softmax_CB,
        sampling=sampling,
        margin=margin,
        entropy=entropy,
        ask_C=ask_C,
    )
