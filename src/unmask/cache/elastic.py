"""Elastic-Cache (arXiv 2510.14973): a few rows run in every layer until a layer's attention has moved too far; from
there on all rows run.

The rows of a pass are the window, what was just committed, and the decided positions that the window looked at most in
the last pass (*tracked*, by layer). Before a layer renews its keys, the attention of the tracked positions is kept; if
it is no longer similar afterwards, the layer *trips*, and the layers behind it recompute every position from the input
that it last had there.

How many rows a layer has is known once the layer before it has run: such a pass is never captured. The pass's list
holds all visible positions from the start; what a layer does not compute costs its place in the list, and a norm.

M rows, P rows of them, S seats, N positions, D hidden size, L layers, E entries; T tested rows of a seat, s seats that
are compared together; H query heads, Hkv key heads, hd head size
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from unmask import ops
from unmask.cache.context import PagedContext, Part
from unmask.cache.policy import CachePolicy, Limits, SeatLimits, rows_a_layer
from unmask.cache.pool import PagePool, PlaneSpec
from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan, at_rows
from unmask.models.config import ModelConfig
from unmask.models.transformer import Layer

TINY_NORM = 1e-8  # of the cosine, as usual; it pulls the mean down for keys that hardly anyone looks at
MOST_WEIGHTS = 1 << 25
"""Attention weights that are compared at a time: 128 MiB in fp32, of what they were and of what they are."""


class Thresholds(Limits, Protocol):
    """What this policy reads of the requests, one value a seat."""

    drift_threshold_S: Tensor
    """float32: a layer trips below this similarity."""


class Elastic(CachePolicy):
    """Any pass may turn out to recompute the whole canvas, so each has room for it, and none is a refresh."""

    refreshes = False
    static = False

    def __init__(
        self,
        *,
        cosine: str = "heads",
        tested: str = "union",
        redo: bool = False,
        all_masks: bool = False,
        run_new: bool = True,
    ) -> None:
        """``cosine``: between vectors over the "heads", mean over keys, or over the "keys", mean over heads.
        ``tested``: a layer tests the tracked positions of all layers ("union") or its "own". ``redo``: the layer that
        trips is recomputed too. ``all_masks``: undecided positions beyond the window run, and count for the tracking.
        ``run_new``: what the last pass committed runs.
        """
        self.cosine, self.tested, self.redo = cosine, tested, redo
        self.all_masks, self.run_new = all_masks, run_new

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(canvas.active_S)

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        """All that may run; the gate says which do."""
        return canvas.visible_SN()

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        return prompt + answer

    def counted(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        return canvas.undecided_SN() if self.all_masks else candidate_SN

    def planes(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        """What is kept of a position beside K and V: its input of the layer, its query after rotation, and whether the
        layer tracks it."""
        return {
            "x": PlaneSpec((config.hidden_size,), dtype),
            "q": PlaneSpec((config.num_heads, config.head_dim), dtype),
            "tracked": PlaneSpec((), torch.bool),
        }

    def gate(
        self,
        canvas: Canvas,
        limits: Limits,
        plan: RowPlan,
        context: PagedContext,
        pool: PagePool,
        most_new: int | None,  # noqa: ARG002
    ) -> ElasticGate:
        """How this pass goes through the layers."""
        assert plan.per_seat is None, "rows that grow inside the pass have no fixed shape"
        new_M, decided_M = at_rows(canvas.new_SN() & self.run_new, plan), at_rows(canvas.final_SN, plan)
        return ElasticGate(
            self,
            plan,
            context,
            pool,
            new_M=new_M,
            decided_M=decided_M,
            full_S=canvas.pass_S == 0,
            threshold_S=limits.drift_threshold_S,  # type: ignore[attr-defined]
            num_tracked_S=limits.track_S,
        )


class Memory(NamedTuple):
    """Queries of the tested rows, and the keys of all positions, as they are in memory at one time."""

    q_STH: Tensor
    """[S, T, H, hd]"""
    k_SN: Tensor
    """[S, N, Hkv, hd]"""


class Tested(NamedTuple):
    """The rows whose attention a layer compares, seat by seat in equally many places."""

    row_ST: Tensor
    """int64: any row where a seat has no more."""
    here_ST: Tensor
    """bool: no padding."""


class ElasticGate:
    """One pass through the layers. Rows are places in the pass's list, which has one for every visible position."""

    def __init__(
        self,
        policy: Elastic,
        plan: RowPlan,
        context: PagedContext,
        pool: PagePool,
        *,
        new_M: Tensor,
        decided_M: Tensor,
        full_S: Tensor,
        threshold_S: Tensor,
        num_tracked_S: Tensor,
    ) -> None:
        """``new`` rows run, ``decided`` ones can be tracked. ``full`` seats compute all rows in the layer at hand and
        behind it: a request's first pass begins so. ``threshold`` float [S]: a layer trips below it."""
        assert context.counts_M is not None, "whose attention counts is not known"
        self.policy, self.plan, self.context, self.pool = policy, plan, context, pool
        self.full_S, self.decided_M = full_S, decided_M
        self.threshold_S, self.num_tracked_S = threshold_S, num_tracked_S
        self.tracked_LM = pool.planes["tracked"][:, context.write_M]
        """As the last pass left it; meaningless in a request's first one, which tests nothing."""
        self._union_M = self.tracked_LM.any(0)
        self._wanted_M = context.counts_M | new_M | self._union_M
        self.first_S = torch.nn.functional.pad(plan.num_rows_S.cumsum(0), (1, 0))
        """int64 [S + 1]: rows of each seat, from one to the next."""
        self.computed: list[Tensor] = []
        """int64 by layer: the rows that it computed."""
        self.similarity: list[Tensor] = []
        """float64 [S] by layer; NaN of seats that were not tested."""
        self.trips: list[Tensor] = []
        """bool [S] by layer."""

    @property
    def num_rows_S(self) -> Tensor:
        seat_P = self.plan.seat_M[torch.cat(self.computed)]
        num_computed_S = torch.zeros_like(self.plan.num_rows_S).index_add_(0, seat_P, torch.ones_like(seat_P))
        return rows_a_layer(num_computed_S, len(self.pool.k))

    @property
    def ran_M(self) -> Tensor:
        """bool [M]: rows that a layer computed. Their number never falls from layer to layer, so that the last has
        them all."""
        ran_M = torch.zeros_like(self.plan.seat_M, dtype=torch.bool)
        return ran_M.index_fill_(0, self.computed[-1], True)

    def run(self, layer: Layer, x_MD: Tensor) -> Tensor:
        """The stream behind this layer; rows that it did not compute hold nothing of use."""
        index, context = layer.index, self.context
        x_MD = self._from_memory(index, x_MD)
        normed_MD = layer.attn_norm(x_MD)
        tested = self._tested(index)
        before = self._memory(index, tested)
        rows_P = self._rows()
        part = self._project(layer, normed_MD, rows_P)
        trips_S = self._test(index, tested, before)
        if self.policy.redo:
            self._project(layer, normed_MD, trips_S[self.plan.seat_M].nonzero()[:, 0])
            self.full_S = self.full_S | trips_S
            rows_P = self._rows()
            part = context.part(rows_P)
        self._track(index)
        self.computed.append(rows_P)
        q_P = self.pool.planes["q"][index][part.write_P]
        seen_P = layer.attn.out(context.attend_at(index, q_P, part))
        x_P, normed_P = layer.mlp_norm.add(x_MD[rows_P], seen_P)
        self.full_S = self.full_S | trips_S
        out_MD: Tensor = x_MD.index_copy(0, rows_P, x_P + layer.mlp(normed_P))
        return out_MD

    def _rows(self) -> Tensor:
        """int64: what the layer at hand computes."""
        rows_P: Tensor = (self._wanted_M | self.full_S[self.plan.seat_M]).nonzero()[:, 0]
        return rows_P

    def _from_memory(self, index: int, x_MD: Tensor) -> Tensor:
        """The layer's input at all visible positions: of this pass where the layer before computed it, else the one
        that the position last had here, which may be old."""
        plane_E, write_M = self.pool.planes["x"][index], self.context.write_M
        ran_P = self.computed[-1] if self.computed else self._rows()
        plane_E[write_M[ran_P]] = x_MD[ran_P]
        return plane_E[write_M]

    def _project(self, layer: Layer, normed_MD: Tensor, rows_P: Tensor) -> Part:
        """Renew q, k and v of these rows."""
        part = self.context.part(rows_P)
        if len(rows_P):
            q_P = self.context.project_at(layer.index, normed_MD, layer.attn, part)
            self.pool.planes["q"][layer.index][part.write_P] = q_P
        return part

    # --- the test

    def _tested(self, index: int) -> Tested:
        """Tracked rows of the seats that do not compute everything anyway."""
        seat_M = self.plan.seat_M
        tracked_M = self.tracked_LM[index] if self.policy.tested == "own" else self._union_M
        rows_P = (tracked_M & ~self.full_S[seat_M]).nonzero()[:, 0]
        seat_P = seat_M[rows_P]
        num_S = seat_P.bincount(minlength=len(self.full_S))
        place_P = torch.arange(len(rows_P), device=rows_P.device) - (num_S.cumsum(0) - num_S)[seat_P]
        row_ST = rows_P.new_zeros(len(num_S), int(num_S.max()))
        row_ST[seat_P, place_P] = rows_P
        return Tested(row_ST, torch.arange(row_ST.shape[1], device=rows_P.device) < num_S[:, None])

    def _memory(self, index: int, tested: Tested) -> Memory:
        """What memory holds now, of all seats that hold anything."""
        q_STH = self.pool.planes["q"][index][self.context.write_M[tested.row_ST]]
        entry_SN = self.context.sight.entries()[:, : self.plan.num_keys]
        return Memory(q_STH, self.pool.k[index][entry_SN if tested.row_ST.numel() else entry_SN[:, :0]])

    def _test(self, index: int, tested: Tested, before: Memory) -> Tensor:
        """bool [S]: the seats that trip in this layer."""
        now, num_S = self._memory(index, tested), tested.here_ST.sum(1)
        similarity_S = self.threshold_S.new_zeros(len(num_S), dtype=torch.float64)
        if tested.row_ST.numel():
            seen_SN = torch.arange(before.k_SN.shape[1], device=num_S.device) < self.plan.num_rows_S[:, None]
            for some in self._chunks(before):
                old, new = (weights(each.q_STH[some], each.k_SN[some], seen_SN[some]) for each in (before, now))
                similarity_S[some] = similarity(old, new, tested.here_ST[some], seen_SN[some], self.policy.cosine)
        # One that has nothing to test is like itself.
        similarity_S = torch.where(num_S > 0, similarity_S, 1.0)
        similarity_S = similarity_S.masked_fill(self.full_S | (self.plan.num_rows_S == 0), torch.nan)
        self.similarity.append(similarity_S)
        self.trips.append(similarity_S < self.threshold_S)
        return self.trips[-1]

    def _chunks(self, memory: Memory) -> Iterator[slice]:
        """Seats whose weights stand at the same time."""
        num_seats, num_tested, num_heads, _ = memory.q_STH.shape
        count = max(1, MOST_WEIGHTS // (num_tested * num_heads * memory.k_SN.shape[1]))
        return (slice(first, first + count) for first in range(0, num_seats, count))

    # --- what the next pass tracks

    @cached_property
    def _looking(self) -> Part:
        """The rows whose attention chooses what is tracked."""
        assert self.context.counts_M is not None
        return self.context.part(self.context.counts_M.nonzero()[:, 0])

    def _mass_M(self, index: int) -> Tensor:
        """How much the looking rows attend to each row's position."""
        part, k_E = self._looking, self.pool.k[index]
        q_P = self.pool.planes["q"][index][part.write_P]
        all_P = torch.ones(len(q_P), dtype=torch.bool, device=q_P.device)
        mass_SN = ops.tracking_mass(q_P, k_E, part.sight, all_P, softmax=True)
        return mass_SN[self.plan.seat_M, self.plan.column_M]

    def _track(self, index: int) -> None:
        """The decided positions that the looking rows attend to most; ties to the leftmost."""
        seats = (self.plan.seat_M, self.first_S, self.num_tracked_S.long())
        most_M = ops.furthest(self._mass_M(index), self.decided_M, *seats)
        self.pool.planes["tracked"][index][self.context.write_M] = most_M


def weights(q_sTH: Tensor, k_sN: Tensor, seen_sN: Tensor) -> Tensor:
    """Attention weights [s, T, H, N], fp32 or wider; 0 where a seat sees nothing."""
    wide = torch.promote_types(k_sN.dtype, torch.float32)
    grouped_sT = q_sTH.to(wide).unflatten(2, (k_sN.shape[2], -1))  # neighbouring query heads share a key head
    score_sT = torch.einsum("stkgd,snkd->stkgn", grouped_sT, k_sN.to(wide)) * q_sTH.shape[-1] ** -0.5
    score_sT = score_sT.masked_fill(~seen_sN[:, None, None, None], -torch.inf)
    weight_sTHN: Tensor = score_sT.softmax(-1).flatten(2, 3)
    return weight_sTHN.masked_fill(~seen_sN[:, None, None], 0.0)  # a seat without rows sees nothing: NaN


def similarity(before_sTHN: Tensor, now_sTHN: Tensor, here_sT: Tensor, seen_sN: Tensor, cosine: str) -> Tensor:
    """float64 [s]: mean cosine of the weights before and now over a seat's rows that are ``here``, and over the keys
    that it sees if it is between vectors over the "heads", or else over the heads."""
    along = 2 if cosine == "heads" else 3
    norms = before_sTHN.norm(dim=along).clamp(min=TINY_NORM) * now_sTHN.norm(dim=along).clamp(min=TINY_NORM)
    cosine_sT = ((before_sTHN * now_sTHN).sum(along) / norms).double()
    counted_sT = here_sT[:, :, None] & seen_sN[:, None] if cosine == "heads" else here_sT[:, :, None]
    counted_sT = counted_sT.expand_as(cosine_sT)
    mean_s: Tensor = (cosine_sT * counted_sT).sum((1, 2)) / counted_sT.sum((1, 2)).clamp(min=1)
    return mean_s
