"""`ops.attend` against a loop over rows, in fp64: what a row sees, and nothing else, decides its output.

S seats, Q rows a seat, E entries, N canvas entries, J live entries, H query heads, Hkv key heads, hd head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from unmask import ops

HEADS = [(4, 4), (4, 2), (6, 1)]
S, Q, N, E, HD = 3, 6, 9, 15, 8


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    q_SQ: Tensor
    k_SE: Tensor
    v_SE: Tensor
    see_SQ: Tensor
    shadow_SN: Tensor
    live_SJ: Tensor
    live_bits_SQJ: Tensor

    def __call__(self) -> Tensor:
        return ops.attend(**vars(self))

    def seen(self, seat: int, row: int) -> list[int]:
        """Entries that the definition lets a row see; one that is seen twice is listed twice."""
        sweep = [n for n in range(int(self.see_SQ[seat, row])) if not self.shadow_SN[seat, n]]
        live = zip(self.live_SJ[seat].tolist(), self.live_bits_SQJ[seat, row].tolist())
        return sweep + [entry for entry, bit in live if bit]

    def by_loop(self) -> Tensor:
        """One row and one head at a time."""
        out = torch.zeros_like(self.q_SQ)
        group = self.q_SQ.shape[2] // self.k_SE.shape[2]
        for seat, row, head in torch.cartesian_prod(*map(torch.arange, self.q_SQ.shape[:3])).tolist():
            if seen := self.seen(seat, row):
                key, value = (x[seat, seen, head // group] for x in (self.k_SE, self.v_SE))
                score = key @ self.q_SQ[seat, row, head] / math.sqrt(HD)
                out[seat, row, head] = score.softmax(0) @ value
        return out


def call(heads: tuple[int, int], num_live: int, seed: int = 0) -> Call:
    """Random arguments: reach from nothing to everything, live entries from the canvas and from scratch."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    see_SQ = torch.randint(0, N + 1, (S, Q), generator=generator, dtype=torch.int32)
    see_SQ[:, 0], see_SQ[:, 1] = 0, N
    return Call(
        q_SQ=randn(S, Q, heads[0], HD),
        k_SE=randn(S, E, heads[1], HD),
        v_SE=randn(S, E, heads[1], HD),
        see_SQ=see_SQ,
        shadow_SN=chance(S, N) < 0.3,
        live_SJ=torch.randint(0, E, (S, num_live), generator=generator),
        live_bits_SQJ=chance(S, Q, num_live) < 0.5,
    )


def close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("num_live", [0, 1, 5, 64])
@pytest.mark.parametrize("heads", HEADS)
def test_attend_is_the_loop(heads: tuple[int, int], num_live: int) -> None:
    """Random reach, shadow and live lists, in groups of query heads, with and without a live list."""
    for seed in range(4):
        given = call(heads, num_live, seed)
        close(given(), given.by_loop())


@pytest.mark.parametrize("change", ["see", "shadow", "bits", "live"])
def test_the_loop_notices_every_argument(change: str) -> None:
    """Negative control: a call that differs in one mask is not the loop's result."""
    given = call((4, 2), 5)
    wrong = {
        "see": replace(given, see_SQ=(given.see_SQ + 1).clamp(max=N)),
        "shadow": replace(given, shadow_SN=torch.zeros_like(given.shadow_SN)),
        "bits": replace(given, live_bits_SQJ=~given.live_bits_SQJ),
        "live": replace(given, live_SJ=(given.live_SJ + 1) % E),
    }[change]
    with pytest.raises(AssertionError):
        close(wrong(), given.by_loop())


@pytest.mark.parametrize("num_live", [0, 3])
def test_rows_that_see_nothing_are_zero(num_live: int) -> None:
    """No reach and no bits, or a reach that is all shadow, gives exact zeros; a row next to it keeps its value."""
    given = call((4, 2), num_live)
    bits_SQJ = given.live_bits_SQJ.clone()
    bits_SQJ[:, :2] = False
    shadow_SN = given.shadow_SN.clone()
    shadow_SN[0] = True  # row 1 of seat 0 reaches everything, and all of it is shadowed
    given = replace(given, live_bits_SQJ=bits_SQJ, shadow_SN=shadow_SN)
    out = given()
    assert not out[:, 0].any()
    assert not out[0, 1].any()
    assert out[1:, 1].any()
    close(out, given.by_loop())


def test_what_no_row_sees_may_hold_any_finite_number() -> None:
    """Entries outside a row's view do not change one bit of it, however large they are."""
    given = call((4, 2), 4)
    before = given()
    for seat in range(S):
        for row in range(Q):
            hidden = sorted(set(range(E)) - set(given.seen(seat, row)))
            k_SE, v_SE = given.k_SE.clone(), given.v_SE.clone()
            k_SE[seat, hidden], v_SE[seat, hidden] = 1e4, -1e4
            assert torch.equal(replace(given, k_SE=k_SE, v_SE=v_SE)()[seat, row], before[seat, row])


def test_a_repeated_entry_counts_twice() -> None:
    """Why a position that is live must be shadowed: an entry seen in the sweep and in the list weighs double."""
    given = call((4, 4), 1)
    given = replace(
        given,
        see_SQ=torch.full((S, Q), N, dtype=torch.int32),
        shadow_SN=torch.zeros(S, N, dtype=torch.bool),
        live_SJ=torch.full((S, 1), 4),
        live_bits_SQJ=torch.ones(S, Q, 1, dtype=torch.bool),
    )
    close(given(), given.by_loop())
    shadow_SN = given.shadow_SN.clone()
    shadow_SN[:, 4] = True
    once, swept = replace(given, shadow_SN=shadow_SN), replace(given, live_bits_SQJ=~given.live_bits_SQJ)
    close(once(), swept())
    with pytest.raises(AssertionError):
        close(given(), swept())
