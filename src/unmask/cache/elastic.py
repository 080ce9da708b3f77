"""Elastic-Cache (arXiv 2510.14973): a few rows run in every layer until a layer's attention has moved too far; from
there on all rows run.

The rows of a pass are the window, what was just committed, and the decided positions that the window looked at most in
the last pass (*tracked*, by layer). Before a layer renews its keys, the attention of the tracked positions is kept; if
it is no longer similar afterwards, the layer *trips*, and the layers behind it recompute every position from the input
that it last had there.

How many rows a layer has is known once the layer before it has run, and the host decides it, by what the test showed:
such a pass is never captured. The pass's list holds all visible positions from the start; those that a layer does not
compute cost their place in the list, and a norm.

M rows, S seats, N positions, D hidden size, L layers, E entries; of one seat: A visible positions (all run or may
run), R rows of a layer that is reused, W rows that look, T tested rows; H query heads, Hkv key heads, hd head size
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from unmask.cache.context import PagedContext
from unmask.cache.policy import CachePolicy, Limits, SeatLimits, rows_a_layer
from unmask.cache.pool import PagePool, PlaneSpec
from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan, at_rows
from unmask.models.config import ModelConfig
from unmask.models.transformer import Layer

TINY_NORM = 1e-8  # of the cosine, as usual; it pulls the mean down for keys that hardly anyone looks at


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
        assert context.counts_M is not None, "whose attention counts is not known"
        assert plan.per_seat is None, "rows that grow inside the pass have no fixed shape"
        decided_M, new_M = at_rows(canvas.final_SN, plan), at_rows(canvas.new_SN(), plan)
        gate = ElasticGate(self, plan, context, pool)
        num_rows, passes, num_tracked = torch.stack((plan.num_rows_S, canvas.pass_S, limits.track_S)).tolist()
        thresholds = limits.drift_threshold_S.tolist()  # type: ignore[attr-defined]
        wanted_M = context.counts_M | (new_M & self.run_new) | gate.tracked_LM.any(0)
        first = 0
        for seat, count in enumerate(num_rows):
            if count:
                part = slice(first, first + count)
                gate.seats.append(
                    SeatPass(
                        seat=seat,
                        first=first,
                        all_A=torch.arange(first, first + count, device=canvas.device),
                        wanted_R=_places(wanted_M, part),
                        look_W=_places(context.counts_M, part),
                        decided_T=_places(decided_M, part),
                        threshold=thresholds[seat],
                        num_tracked=num_tracked[seat],
                        full=passes[seat] == 0,
                    )
                )
            first += count
        return gate


def _places(wanted_M: Tensor, part: slice) -> Tensor:
    """int64: the wanted rows of one seat."""
    place_W: Tensor = wanted_M[part].nonzero()[:, 0] + part.start
    return place_W


@dataclass
class SeatPass:
    """One seat's part of a pass; rows are places in the pass's list, which has one for every visible position."""

    seat: int
    first: int
    all_A: Tensor
    wanted_R: Tensor
    """Rows of a layer that is reused."""
    look_W: Tensor
    """Rows whose attention chooses what is tracked."""
    decided_T: Tensor
    """Rows that can be tracked."""
    threshold: float
    num_tracked: int
    full: bool
    """The layer at hand, and those behind it, compute all rows. A request's first pass begins so."""
    tripped: int | None = None
    similarity: list[float | None] = field(default_factory=list)
    """By layer; None where it was not tested."""

    @property
    def rows(self) -> Tensor:
        """What the layer at hand computes."""
        return self.all_A if self.full else self.wanted_R


class ElasticGate:
    """One pass through the layers."""

    def __init__(self, policy: Elastic, plan: RowPlan, context: PagedContext, pool: PagePool) -> None:
        self.policy, self.plan, self.context, self.pool = policy, plan, context, pool
        self.seats: list[SeatPass] = []
        self.tracked_LM = pool.planes["tracked"][:, context.write_M]
        """As the last pass left it; meaningless in a request's first one, which tests nothing."""
        self.computed: list[Tensor] = []
        """int64 by layer: the rows that it computed."""
        self._num_computed = [0] * len(plan.num_rows_S)

    @property
    def num_rows_S(self) -> Tensor:
        return rows_a_layer(self.plan.num_rows_S.new_tensor(self._num_computed), len(self.pool.k))

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
        tested = {each.seat: self._tested(index, each) for each in self.seats if not each.full}
        before = {each.seat: self._weights(index, each, tested[each.seat]) for each in self.seats if not each.full}
        self._project(layer, normed_MD, [each.rows for each in self.seats])
        tripping = self._test(index, tested, before)
        if self.policy.redo and tripping:
            self._project(layer, normed_MD, [each.all_A for each in tripping])
            self._fill(tripping)
        for each in self.seats:
            self._track(index, each)
            self._num_computed[each.seat] += len(each.rows)
        rows_P = torch.cat([each.rows for each in self.seats])
        self.computed.append(rows_P)
        part = context.part(rows_P)
        q_P = self.pool.planes["q"][index][part.write_P]
        seen_P = layer.attn.out(context.attend_at(index, q_P, part))
        x_P, normed_P = layer.mlp_norm.add(x_MD[rows_P], seen_P)
        self._fill(tripping)
        out_MD: Tensor = x_MD.index_copy(0, rows_P, x_P + layer.mlp(normed_P))
        return out_MD

    @staticmethod
    def _fill(tripping: list[SeatPass]) -> None:
        for each in tripping:
            each.full = True

    def _from_memory(self, index: int, x_MD: Tensor) -> Tensor:
        """The layer's input at all visible positions: of this pass where the layer before computed it, else the one
        that the position last had here, which may be old."""
        plane_E, write_M = self.pool.planes["x"][index], self.context.write_M
        ran_P = self.computed[-1] if self.computed else torch.cat([each.rows for each in self.seats])
        plane_E[write_M[ran_P]] = x_MD[ran_P]
        return plane_E[write_M]

    def _project(self, layer: Layer, normed_MD: Tensor, rows: list[Tensor]) -> None:
        """Renew q, k and v of these rows, which are in the order of the seats."""
        part = self.context.part(torch.cat(rows))
        q_P = self.context.project_at(layer.index, normed_MD, layer.attn, part)
        self.pool.planes["q"][layer.index][part.write_P] = q_P

    # --- the test

    def _tested(self, index: int, each: SeatPass) -> Tensor:
        """int64 [T]: the rows whose attention is compared."""
        tracked_LM = self.tracked_LM[:, each.first : each.first + len(each.all_A)]
        own_A = tracked_LM[index] if self.policy.tested == "own" else tracked_LM.any(0)
        return each.all_A[own_A]

    def _weights(self, index: int, each: SeatPass, rows_W: Tensor) -> Tensor:
        """Attention weights [W, H, A] of a seat's rows over all that it sees, of the queries and keys in memory."""
        write_M, k_E = self.context.write_M, self.pool.k[index]
        wide = torch.promote_types(k_E.dtype, torch.float32)
        q_W = self.pool.planes["q"][index][write_M[rows_W]].to(wide)
        k_A = k_E[write_M[each.all_A]].to(wide)
        grouped_W = q_W.unflatten(1, (k_A.shape[1], -1))  # neighbouring query heads share a key head
        score_W = torch.einsum("wkgd,akd->wkga", grouped_W, k_A) * q_W.shape[-1] ** -0.5
        weight_WHA: Tensor = score_W.softmax(-1).flatten(1, 2)
        return weight_WHA

    def _test(self, index: int, tested: dict[int, Tensor], before: dict[int, Tensor]) -> list[SeatPass]:
        """The seats that trip in this layer. One wait for the device."""
        testing = [each for each in self.seats if not each.full]
        found = [
            similarity(before[each.seat], self._weights(index, each, tested[each.seat]), self.policy.cosine)
            for each in testing
        ]
        values = torch.stack(found).tolist() if found else []
        for each in self.seats:
            each.similarity.append(None)
        for each, value in zip(testing, values, strict=True):
            each.similarity[-1] = value
            if value < each.threshold:
                each.tripped = index
        return [each for each in testing if each.tripped == index]

    # --- what the next pass tracks

    def _track(self, index: int, each: SeatPass) -> None:
        """The decided positions that the looking rows attend to most; ties to the leftmost."""
        mass_A = self._weights(index, each, each.look_W).sum((0, 1))
        order_T = mass_A[each.decided_T - each.first].argsort(descending=True, stable=True)
        most_T = each.decided_T[order_T[: each.num_tracked]]
        tracked_E, write_M = self.pool.planes["tracked"][index], self.context.write_M
        tracked_E[write_M[each.all_A]] = False
        tracked_E[write_M[most_T]] = True


def similarity(before_THA: Tensor, now_THA: Tensor, cosine: str) -> Tensor:
    """float64: mean cosine of each row's weights before and now; 1 if there is no row."""
    if not len(now_THA):
        return torch.ones((), dtype=torch.float64, device=now_THA.device)
    along = 1 if cosine == "heads" else 2
    norms = before_THA.norm(dim=along).clamp(min=TINY_NORM) * now_THA.norm(dim=along).clamp(min=TINY_NORM)
    mean: Tensor = ((before_THA * now_THA).sum(along) / norms).double().mean()
    return mean
