"""Each operation against its formula, written out in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from unmask import ops


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, gain = randn(3, 5, 48).to(dtype), randn(48, seed=1).to(dtype)
    wide = x.double()
    exact = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * gain.double()
    close(ops.rms_norm(x, gain, 1e-5), exact, dtype)


def test_rms_norm_rounds_before_the_gain() -> None:
    x, gain = randn(64, 48).bfloat16(), randn(48, seed=1).bfloat16()
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(ops.rms_norm(x, gain, 1e-6), unit * gain)


def test_rms_norm_squares_in_fp32() -> None:
    x = torch.full((2, 8), 1e4, dtype=torch.float16)  # 1e8 is beyond fp16
    assert torch.equal(ops.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_a_rotation_of_each_half_split_pair(dtype: torch.dtype) -> None:
    x, angle = randn(2, 5, 3, 8).to(dtype), randn(5, 4, seed=1)
    turned = torch.polar(torch.ones_like(angle), angle).unsqueeze(-2)
    pairs = torch.complex(x.double()[..., :4], x.double()[..., 4:]) * turned
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ours = ops.rope(x, angle.cos().to(wide), angle.sin().to(wide))
    close(ours, torch.cat((pairs.real, pairs.imag), -1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    x = randn(3, 5, 14).to(dtype)
    gate, up = x.double()[..., :7], x.double()[..., 7:]
    close(ops.swiglu(x), gate / (1 + torch.exp(-gate)) * up, dtype)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, may: Tensor) -> Tensor:
    """One query at a time, in fp64; `may` bool [B, Q, N]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b, i, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        keys = may[b, i].nonzero().flatten()
        if len(keys):
            score = k[b, keys, h // group].double() @ q[b, i, h].double() / math.sqrt(q.shape[-1])
            out[b, i, h] = score.softmax(0) @ v[b, keys, h // group].double()
    return out


CASES = {
    "full": (None, None),
    "see": (None, torch.tensor([3, 6, 0])),
    "one mask": (torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) > 0.6, None),
    "masks": (torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(2)) > 0.7, None),
    "both": (torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(3)) > 0.4, torch.tensor([2, 6, 0])),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("case", CASES)
def test_attention(case: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    mask, see = CASES[case]
    q = randn(3, 4, heads[0], 8).to(dtype)
    k, v = randn(3, 6, heads[1], 8, seed=1).to(dtype), randn(3, 6, heads[1], 8, seed=2).to(dtype)
    may = torch.ones(3, 4, 6, dtype=torch.bool)
    may = may if mask is None else may & mask
    may = may if see is None else may & (torch.arange(6) < see[:, None, None])
    close(ops.attention(q, k, v, mask=mask, see=see), plain_attention(q, k, v, may), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_rows_without_keys_are_zero_with_finite_gradients(dtype: torch.dtype) -> None:
    q = randn(2, 3, 4, 8).to(dtype).requires_grad_()
    k = randn(2, 5, 2, 8, seed=1).to(dtype).requires_grad_()
    mask = torch.zeros(2, 3, 5, dtype=torch.bool)
    mask[0, 1, 2] = True
    out = ops.attention(q, k, k, mask=mask)
    out.sum().backward()
    assert out[~mask.any(-1)].abs().max() == 0
    assert out[0, 1].abs().max() > 0
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


def test_attention_compiles_to_the_same_shape_of_graph() -> None:
    from torch._dynamo import explain

    q, k = randn(2, 3, 4, 8), randn(2, 5, 2, 8)
    report = explain(lambda: ops.attention(q, k, k, see=torch.tensor([2, 5])))()
    assert report.graph_break_count == 0
