"""The attention context of the engine: rows write their K/V into the paged pool, and attention reads nothing else.

M rows, P rows of a part, S seats, N positions, E columns of a seat
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unmask import ops
from unmask.cache.pool import PAGE_SIZE, PagePool
from unmask.core.rows import RowPlan
from unmask.models.attention import AttentionWeights, LayerGate, RopeTable


@dataclass(frozen=True)
class MassSpec:
    """Which attention is counted as tracking mass (Flash-dLLM section 3.1 and its released code)."""

    first_layer: int = 2
    last_layer: int | None = None
    """Exclusive; None is the last one."""
    softmax: bool = False
    """Attention weights instead of raw q . k."""

    def counts(self, layer: int) -> bool:
        """Whether this layer's attention is added."""
        return layer >= self.first_layer and (self.last_layer is None or layer < self.last_layer)


@dataclass(frozen=True)
class Part:
    """Rows of a pass that a layer computes, seat by seat."""

    rows_P: Tensor | None
    """int64; None: all of them. Of padding any row."""
    write_P: Tensor
    """int64: pool entries that take what is kept of these rows, 0 of padding."""
    sight: ops.Sight

    def of(self, value_M: Tensor) -> Tensor:
        """The values of these rows."""
        return value_M if self.rows_P is None else value_M[self.rows_P]


class PagedContext:
    """Attention of one plan over the pool; hidden rows are [M, D].

    With ``mass`` and ``counts_M`` bool [M], ``mass_SN`` is afterwards the mean over those rows, summed over the layers.
    """

    def __init__(
        self,
        plan: RowPlan,
        pool: PagePool,
        rope: RopeTable,
        capacity: int,
        *,
        mass: MassSpec | None = None,
        counts_M: Tensor | None = None,
    ) -> None:
        self.plan = plan
        self.gate: LayerGate | None = None
        """Chooses rows inside the pass; None: every layer computes them all."""
        self.counts_M = counts_M
        """Rows whose attention the policy wants to know about."""
        self._pool, self._mass = pool, mass
        self._mass_sum: ops.MassSum | None = None
        if mass is not None and counts_M is not None:
            self._mass_sum = ops.MassSum(counts_M, softmax=mass.softmax)
        self._cos, self._sin = rope.at(plan.pos_M)
        num_seats = len(plan.num_rows_S)
        pages_SP = pool.page_table_SP[:num_seats, : -(-capacity // PAGE_SIZE)]
        live = plan.live
        sight = ops.Sight(
            seat_M=plan.seat_M,
            see_M=plan.see_M,
            num_rows_S=plan.num_rows_S,
            page_table_SP=pages_SP,
            page_size=PAGE_SIZE,
            num_keys=plan.num_keys,
            per_seat=plan.per_seat,
        )
        # Columns of padding go to entry 0, which is written and never read.
        entry_SN, scratch_SX = sight.entries()[:, :capacity], pool.scratch_SX[:num_seats]
        entry_SE = torch.cat((entry_SN, scratch_SX, torch.zeros_like(entry_SN[:, :1])), 1)
        num_columns = plan.row_SE.shape[1]
        padding_SE = torch.arange(num_columns, device=entry_SE.device) == num_columns - 1
        entry_SE = torch.where(padding_SE, 0, entry_SE[:, :num_columns])
        self.write_M = entry_SE[plan.seat_M, plan.column_M]
        """int64 [M]: pool entry that takes each row's K/V."""
        if live is not None:
            live_SJ = entry_SE.gather(1, live.column_SJ)
            sight = ops.Sight(
                **{**vars(sight), "live_SJ": live_SJ, "live_bits_MJ": live.bits_MJ, "shadow_SN": live.shadow_SN}
            )
        self.sight = sight

    def project(self, layer: int, hidden: ops.Rows, weights: AttentionWeights) -> Tensor:
        """Writing comes before attention and is unconditional: the cache is what a later pass does not recompute."""
        return self.project_at(layer, hidden, weights, self.whole)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        counts = self._mass is not None and self._mass.counts(layer)
        return ops.attend(
            q, self._pool.k[layer], self._pool.v[layer], self.sight, self._mass_sum if counts else None
        ).flatten(-2)

    # --- some of the rows

    @property
    def whole(self) -> Part:
        """All rows."""
        return Part(None, self.write_M, self.sight)

    def part(self, rows_P: Tensor) -> Part:
        """Of a ragged pass, these rows."""
        sight, seat_P = self.sight, self.sight.seat_M[rows_P]
        num_S = torch.zeros_like(sight.num_rows_S).index_add(0, seat_P, torch.ones_like(seat_P))
        return Part(rows_P, self.write_M[rows_P], sight.part(seat_P, sight.see_M[rows_P], num_S, None))

    def packed_part(self, chosen_M: Tensor, most: int) -> Part:
        """Of a pass of fixed shape, the rows ``chosen`` bool [M], ``most`` of a seat at most."""
        sight, per_seat = self.sight, self.sight.per_seat
        assert per_seat is not None, "without a fixed shape nothing is packed"
        rows_P, seat_P, write_P, see_P, num_S = ops.picked(chosen_M, per_seat, most, self.write_M, sight.see_M)
        return Part(rows_P, write_P, sight.part(seat_P, see_P, num_S, most))

    @cached_property
    def _turn_2M(self) -> Tensor:
        """Cosines and sines in one tensor: rows are gathered from it at once."""
        return torch.stack((self._cos, self._sin))

    def project_at(self, layer: int, hidden: ops.Rows, weights: AttentionWeights, part: Part) -> Tensor:
        """`project` of some of the rows."""
        k_E, v_E, qkv = self._pool.k[layer], self._pool.v[layer], weights.qkv
        cos_P, sin_P = self._cos, self._sin
        if part.rows_P is not None:
            assert isinstance(hidden, Tensor), "rows in 8 bits are not picked from"
            hidden = hidden[part.rows_P]
            cos_P, sin_P = self._turn_2M.index_select(1, part.rows_P).unbind()
        return ops.project_and_store(hidden, qkv.weight, qkv.bias, cos_P, sin_P, part.write_P, k_E, v_E)

    def attend_at(self, layer: int, q: Tensor, part: Part) -> Tensor:
        """`attend` of some of the rows; their attention is no mass."""
        return ops.attend(q, self._pool.k[layer], self._pool.v[layer], part.sight).flatten(-2)

    def mass_SN(self, num_counted_S: Tensor, capacity: int) -> Tensor:
        """float32 [S, N]: the mean over the rows that counted, summed over layers; zeros if no layer counts."""
        total_SN = None if self._mass_sum is None else self._mass_sum.total_SN()
        if total_SN is None:
            return torch.zeros(len(num_counted_S), capacity, device=num_counted_S.device)
        return (total_SN[:, :capacity] / num_counted_S.clamp(min=1)[:, None]).float()
