"""`ops.project_and_store` against a loop over rows and heads, in fp64.

M rows, D hidden size, H query heads, Hkv key heads, hd head size, E entries
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from unmask import ops

D, HD, E = 10, 6, 23


@dataclass(frozen=True)
class Call:
    """Random arguments; entries that no row writes hold numbers that must stay."""

    hidden_MD: Tensor
    weight: Tensor
    bias: Tensor | None
    angle_M: Tensor
    write_M: Tensor
    k_E: Tensor
    v_E: Tensor

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        k_E, v_E = self.k_E.clone(), self.v_E.clone()
        cos, sin = self.angle_M.cos(), self.angle_M.sin()
        q_M = ops.project_and_store(self.hidden_MD, self.weight, self.bias, cos, sin, self.write_M, k_E, v_E)
        return q_M, k_E, v_E

    def by_loop(self) -> tuple[Tensor, Tensor, Tensor]:
        k_E, v_E, kv_heads = self.k_E.clone(), self.v_E.clone(), self.k_E.shape[1]
        heads = len(self.weight) // HD - 2 * kv_heads
        q_M = torch.zeros(len(self.hidden_MD), heads, HD, dtype=torch.float64)
        for row, hidden_D in enumerate(self.hidden_MD):
            for head in range(heads + 2 * kv_heads):
                rows = slice(head * HD, (head + 1) * HD)
                x = self.weight[rows] @ hidden_D + (0 if self.bias is None else self.bias[rows])
                turned = self._turned(x, self.angle_M[row])
                if head < heads:
                    q_M[row, head] = turned
                elif head < heads + kv_heads:
                    k_E[self.write_M[row], head - heads] = turned
                else:
                    v_E[self.write_M[row], head - heads - kv_heads] = x
        return q_M, k_E, v_E

    @staticmethod
    def _turned(x: Tensor, angle: Tensor) -> Tensor:
        out = x.clone()
        for i, a in enumerate(angle.tolist()):
            low, high = float(x[i]), float(x[i + HD // 2])
            out[i] = low * math.cos(a) - high * math.sin(a)
            out[i + HD // 2] = high * math.cos(a) + low * math.sin(a)
        return out


def call(heads: tuple[int, int], num_rows: int, *, bias: bool, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = (heads[0] + 2 * heads[1]) * HD
    return Call(
        hidden_MD=randn(num_rows, D),
        weight=randn(width, D),
        bias=randn(width) if bias else None,
        angle_M=randn(num_rows, HD // 2) * 3,
        write_M=torch.randperm(E, generator=generator)[:num_rows],
        k_E=randn(E, heads[1], HD),
        v_E=randn(E, heads[1], HD),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 23])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_it_is_the_loop(heads: tuple[int, int], num_rows: int, bias: bool) -> None:
    given = call(heads, num_rows, bias=bias)
    for ours, exact in zip(given(), given.by_loop()):
        torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-12)


def test_entries_that_no_row_writes_stay_bit_for_bit() -> None:
    given = call((4, 2), 7, bias=True)
    _, k_E, v_E = given()
    others = torch.ones(E, dtype=torch.bool).index_fill(0, given.write_M, False)
    assert torch.equal(k_E[others], given.k_E[others])
    assert torch.equal(v_E[others], given.v_E[others])
    assert not (k_E[~others] == given.k_E[~others]).any()


def test_rows_of_padding_may_share_an_entry() -> None:
    given = call((4, 2), 5, bias=False)
    given.write_M[2:] = 0
    q_M, k_E, _ = given()
    exact = given.by_loop()
    torch.testing.assert_close(q_M, exact[0])
    torch.testing.assert_close(k_E[1:], exact[1][1:])


def test_the_loop_notices_keys_that_are_not_rotated() -> None:
    """Negative control."""
    given = call((4, 2), 7, bias=True)
    exact = given.by_loop()
    plain = Call(**{**vars(given), "angle_M": torch.zeros_like(given.angle_M)})()
    assert not torch.allclose(plain[0], exact[0])
    assert not torch.allclose(plain[1], exact[1])
    torch.testing.assert_close(plain[2], exact[2])
