"""Caches that choose rows inside the pass, layer by layer: dLLM-Cache (arXiv 2506.06295) and SPA-Cache.

Between refreshes every answer row goes through every layer, but only those that have drifted most since they were last
computed are attended and sent through the MLP; the others add what they added then. How far a row has drifted is read
off an *identifier*: its value vector (dLLM-Cache), a low-rank proxy of it (SPA-Cache), the normed input, or the
attention output.

M rows, P rows that a layer computes, S seats, N positions, D hidden size, r identifier size, L layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unmask import ops
from unmask.cache.context import PagedContext
from unmask.cache.policy import CachePolicy, Limits, SeatLimits, first_or_every, rows_a_layer
from unmask.cache.pool import PagePool, PlaneSpec
from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan, at_rows, slots
from unmask.models.config import ModelConfig
from unmask.models.transformer import Layer

IDENTIFIERS = ("value", "proxy", "input", "attention")
WRITES = ("dense", "values", "sparse")
"""Which answer rows renew their K and V in a partial pass: all; all V and the chosen rows' K; the chosen ones."""


class Intervals(Limits, Protocol):
    """What this policy reads of the requests, one value a seat."""

    answer_interval_S: Tensor
    """int32: the answer is recomputed every so many passes of the request; 0 never."""


@dataclass(frozen=True)
class Kinds:
    """What the next pass of each seat renews, bool [S]."""

    prompt_S: Tensor
    answer_S: Tensor

    @property
    def refresh_S(self) -> Tensor:
        return self.prompt_S | self.answer_S


class Drift(CachePolicy):
    """Rows chosen by drift. A pass that renews prompt or answer is a refresh; the others run the answer's rows."""

    recurs = True

    def __init__(
        self,
        ratios: Sequence[float],
        *,
        identifier: str = "value",
        proxies: Tensor | None = None,
        rank: int = 0,
        writes: str = "values",
        together: bool = False,
        warmup: int = 0,
        keep_chosen_only: bool = False,
        force_new: bool = False,
        shift: int = 0,
    ) -> None:
        """``ratios``: of the answer's rows, by layer. ``proxies`` [L, r, D], of ``rank`` r, for the identifier "proxy".

        ``together``: a refresh of the prompt is one of the answer too, and passes up to number ``warmup`` are both.
        With ``keep_chosen_only`` identifiers are renewed where a row was computed, so that drift adds up.
        ``force_new``: what the last pass committed is chosen first.
        """
        self.ratios, self.writes = list(ratios), writes
        self.identifier, self.proxies, self.rank = identifier, proxies, rank
        self.together, self.warmup, self.shift = together, warmup, shift
        self.keep_chosen_only, self.force_new = keep_chosen_only, force_new

    def planes(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        """What is kept of a position beside K and V: what the layer added to it, and its identifier."""
        delta = {"delta": PlaneSpec((config.hidden_size,), dtype)}
        if self.identifier == "value":
            return delta
        wide = torch.promote_types(dtype, torch.float32)
        size = self.rank if self.identifier == "proxy" else config.hidden_size
        return delta | {"identifier": PlaneSpec((size,), wide if self.identifier == "proxy" else dtype)}

    def kinds(self, canvas: Canvas, limits: Intervals) -> Kinds:
        """By the request's own count of passes."""
        prompt_S, answer_S = first_or_every(canvas, torch.stack((limits.interval_S, limits.answer_interval_S)))
        if self.together:
            prompt_S = prompt_S | (canvas.pass_S <= self.warmup)
            answer_S = answer_S | prompt_S
        leader_S = canvas.leader_or_self_S()  # a guidance twin has no parameters of its own
        return Kinds(prompt_S[leader_S], answer_S[leader_S])

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:
        return self.kinds(canvas, limits).refresh_S  # type: ignore[arg-type]

    def must(self, canvas: Canvas, limits: Intervals) -> Tensor:
        """bool [S, N]: positions that every layer computes."""
        kinds, answer_SN = self.kinds(canvas, limits), self._answer(canvas)
        return canvas.visible_SN() & torch.where(answer_SN, kinds.answer_S[:, None], kinds.prompt_S[:, None])

    def _answer(self, canvas: Canvas) -> Tensor:
        return canvas.pos_1N() >= canvas.prompt_S[:, None]

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        """The answer, chosen from or not, and the prompt where it is renewed."""
        run_SN = self._answer(canvas) | self.kinds(canvas, limits).prompt_S[:, None]  # type: ignore[arg-type]
        if self.shift and not self.together:  # the row that scores the answer's first position goes along
            run_SN = run_SN | (canvas.pos_1N() >= canvas.prompt_S[:, None] - self.shift)
        return canvas.visible_SN() & run_SN

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        return min(answer + self.shift, prompt + answer)

    def gate(self, canvas: Canvas, limits: Limits, plan: RowPlan, context: PagedContext, pool: PagePool) -> DriftGate:
        """How this pass goes through the layers."""
        must_M = at_rows(self.must(canvas, limits), plan)  # type: ignore[arg-type]
        answer_M = at_rows(self._answer(canvas) & canvas.visible_SN(), plan)
        new_M = at_rows(canvas.new_SN(), plan)
        length_S = (canvas.end_S - canvas.prompt_S).clamp(min=0)
        return DriftGate(self, plan, context, pool, must_M, answer_M & ~must_M, new_M, length_S)


class DriftGate:
    """One pass through the layers."""

    def __init__(
        self,
        policy: Drift,
        plan: RowPlan,
        context: PagedContext,
        pool: PagePool,
        must_M: Tensor,
        optional_M: Tensor,
        new_M: Tensor,
        length_S: Tensor,
    ) -> None:
        self.policy, self.plan, self.context, self.pool = policy, plan, context, pool
        self.must_M, self.optional_M, self.new_M, self.length_S = must_M, optional_M, new_M, length_S
        ends_S = plan.num_rows_S if plan.per_seat is None else torch.full_like(plan.num_rows_S, plan.per_seat)
        self.first_S = torch.nn.functional.pad(ends_S.cumsum(0), (1, 0))
        """int64 [S + 1]: rows of each seat, padding included, from one to the next."""
        self.num_computed_S = torch.zeros_like(plan.num_rows_S)
        """Rows computed, summed over layers."""
        self.chosen: list[Tensor] = []
        """bool [M] by layer."""

    @property
    def num_rows_S(self) -> Tensor:
        return rows_a_layer(self.num_computed_S, len(self.pool.k))

    @property
    def ran_M(self) -> Tensor:
        """bool [M]: rows that a layer behind the first computed. The first computes them all, and says nothing."""
        return torch.stack(self.chosen[1:] or self.chosen).any(0)

    def run(self, layer: Layer, x_MD: Tensor) -> Tensor:
        """The stream behind this layer."""
        index, context = layer.index, self.context
        normed_MD = layer.attn_norm(x_MD)
        chosen_M = torch.ones_like(self.must_M) if index == 0 else self._choose(layer, normed_MD)
        real_M = self._real()
        chosen_M = chosen_M & real_M
        self.chosen.append(chosen_M)
        self.num_computed_S.index_add_(0, self.plan.seat_M, chosen_M.long())
        rows_P, valid_P = self._picked(chosen_M, index)
        q_P = self._project(layer, normed_MD, rows_P, valid_P)
        seen_P = layer.attn.out(context.attend_at(index, q_P, rows_P, valid_P))
        _, normed_P = layer.mlp_norm.add(x_MD[rows_P], seen_P)
        delta_P = seen_P + layer.mlp(normed_P)
        plane_E = self.pool.planes["delta"][index]
        plane_E.index_copy_(0, torch.where(valid_P, context.write_M[rows_P], 0), delta_P.to(plane_E.dtype))
        return x_MD + plane_E[context.write_M].to(x_MD.dtype)

    def _real(self) -> Tensor:
        """bool [M]: no padding."""
        return self.plan.column_M < self.plan.row_SE.shape[1] - 1

    def _picked(self, chosen_M: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """The chosen rows, seat by seat, and which of them are no padding."""
        per_seat = self.plan.per_seat
        if per_seat is None:
            rows_P = chosen_M.nonzero()[:, 0]
            return rows_P, torch.ones_like(rows_P, dtype=torch.bool)
        most = per_seat if index == 0 else max(1, int(per_seat * self.policy.ratios[index]))
        slot_SP, _ = slots(chosen_M.view(-1, per_seat), most)
        valid_SP = slot_SP < per_seat
        first_S1 = torch.arange(len(slot_SP), device=slot_SP.device)[:, None] * per_seat
        return (first_S1 + torch.where(valid_SP, slot_SP, 0)).flatten(), valid_SP.flatten()

    # --- which rows

    def _choose(self, layer: Layer, normed_MD: Tensor) -> Tensor:
        """bool [M]"""
        drift_M = self._renew(layer, normed_MD)
        ratio = self.policy.ratios[layer.index]
        count_S = (self.length_S.double() * ratio).floor().clamp(min=1 if ratio > 0 else 0).long()
        if self.policy.force_new:
            drift_M = torch.where(self.new_M, torch.inf, drift_M)
        seats = (self.plan.seat_M, self.first_S, count_S)
        picked_M = self.must_M | ops.furthest(drift_M, self.optional_M, *seats)
        if self.policy.keep_chosen_only and self._seen_M is not None:
            self._keep(layer.index, self._seen_M, picked_M)
        return picked_M

    def _renew(self, layer: Layer, normed_MD: Tensor) -> Tensor:
        """Drift of each row, 1 - cosine, from what is kept of it; what is kept is then this pass's."""
        index, write_M = layer.index, self.context.write_M
        self._seen_M: Tensor | None = None
        if self.policy.identifier == "value":  # V itself is what is kept, and is renewed where it is projected
            self._value_M = layer.attn.values(normed_MD)
            return ops.drift(self._value_M, self.pool.v[index].flatten(1), write_M)
        seen_M = self._identify(index, normed_MD)
        if self.policy.keep_chosen_only:
            self._seen_M = seen_M
        kept_M = None if self.policy.keep_chosen_only else self.must_M | self.optional_M
        return ops.drift(seen_M, self.pool.planes["identifier"][index], write_M, kept_M)

    def _keep(self, index: int, seen_M: Tensor, where_M: Tensor) -> None:
        plane_E = self.pool.planes["identifier"][index]
        plane_E.index_copy_(0, torch.where(where_M, self.context.write_M, 0), seen_M.to(plane_E.dtype))

    def _identify(self, index: int, normed_MD: Tensor) -> Tensor:
        if self.policy.identifier == "proxy":
            assert self.policy.proxies is not None, "the policy was made without proxies"
            proxy_rD = self.policy.proxies[index]
            return normed_MD.to(proxy_rD.dtype) @ proxy_rD.T
        return normed_MD

    # --- queries, keys and values

    def _project(self, layer: Layer, normed_MD: Tensor, rows_P: Tensor, valid_P: Tensor) -> Tensor:
        """Rotated queries of the picked rows; K and V go to the pool as the policy says."""
        attn, context, writes = layer.attn, self.context, self.policy.writes
        if layer.index == 0 or writes == "dense":
            q_M = context.project(layer.index, normed_MD, attn)
            return q_M[rows_P]
        q_P = context.project_at(layer.index, normed_MD, attn, rows_P, valid_P)
        if writes == "values":
            value_M = self._value_M if self.policy.identifier == "value" else layer.attn.values(normed_MD)
            v_E = self.pool.v[layer.index]
            # Where nothing is chosen nothing is renewed: the layer is left as it is.
            renewed_M = self.must_M | self.optional_M if self.policy.ratios[layer.index] > 0 else self.must_M
            write_M = torch.where(renewed_M, context.write_M, 0)
            v_E.index_copy_(0, write_M, value_M.unflatten(1, v_E.shape[1:]).to(v_E.dtype))
        return q_P
