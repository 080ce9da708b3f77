"""Caches that choose rows inside the pass, layer by layer: dLLM-Cache (arXiv 2506.06295) and SPA-Cache.

Between refreshes every answer row goes through every layer, but only those that have drifted most since they were last
computed are attended and sent through the MLP; the others add what they added then. How far a row has drifted is read
off an *identifier*: its value vector (dLLM-Cache), a low-rank proxy of it (SPA-Cache), the normed input, or the
attention output, for which every row is attended and only the MLP is saved.

M rows, P rows that a layer computes, S seats, N positions, D hidden size, r identifier size, L layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from unmask import ops
from unmask.cache.context import PagedContext, Part
from unmask.cache.policy import CachePolicy, Limits, SeatLimits, first_or_every, rows_a_layer
from unmask.cache.pool import PagePool, PlaneSpec
from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan, at_rows
from unmask.errors import ConfigError, nearest
from unmask.models.config import ModelConfig
from unmask.models.transformer import Layer

IDENTIFIERS = ("value", "proxy", "input", "attention")
WRITES = ("dense", "values", "sparse")
"""Which answer rows renew their K and V in a partial pass: all; all V and the chosen rows' K; the chosen ones."""
REUSE = ("delta", "absolute")
"""What a row that is not chosen goes on with: its stream and what the layer added to it when it was last computed, or
the layer's output of then."""
SCORED = ("answer", "all")
"""Rows that are chosen from: without those of the prompt, or all."""
FIRST_LAYER = ("needed", "all", "chosen")
"""Which rows the first layer computes in a partial pass: those from which another layer chooses; those of the prompt
too, which changes nothing; or what it chooses like any other layer."""


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
        reuse: str = "delta",
        scored: str = "answer",
        first_layer: str = "needed",
        shift: int = 0,
    ) -> None:
        """``ratios``: of the scored rows, by layer. ``proxies`` [L, r, D], of ``rank`` r, for the identifier "proxy".

        ``together``: a refresh of the prompt is one of the answer too, and passes up to number ``warmup`` are both.
        With ``keep_chosen_only`` identifiers are renewed where a row was computed, so that drift adds up; values are
        renewed as ``writes`` says. ``force_new``: what the last pass committed is chosen too, beside the number.

        Raises:
            ConfigError: a word that is none of the constants above, a ratio outside of [0, 1], or proxies that do not
                fit the rest.
        """
        self.ratios, self.writes = list(ratios), writes
        self.identifier, self.proxies, self.rank = identifier, proxies, rank
        self.together, self.warmup, self.shift = together, warmup, shift
        self.keep_chosen_only, self.force_new = keep_chosen_only, force_new
        self.reuse, self.scored, self.first_layer = reuse, scored, first_layer
        self._check()
        self._sent: tuple[Sequence[float], Tensor] | None = None

    def counts(self, length_S: Tensor) -> Tensor:
        """int64 [L, S]: rows that each layer chooses of answers of such lengths; one at least where it chooses any."""
        if self._sent is None or self._sent[0] != self.ratios or self._sent[1].device != length_S.device:
            # Once, since a captured pass cannot send anything.
            ratio_L = torch.tensor(self.ratios, dtype=torch.float64)
            self._sent = (list(self.ratios), torch.stack((ratio_L, (ratio_L > 0).double())).to(length_S.device))
        ratio_L, least_L = self._sent[1]
        return torch.maximum((ratio_L[:, None] * length_S).floor(), least_L[:, None]).long()

    def _check(self) -> None:
        for name, known in (
            ("identifier", IDENTIFIERS),
            ("writes", WRITES),
            ("reuse", REUSE),
            ("scored", SCORED),
            ("first_layer", FIRST_LAYER),
        ):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} is {value!r}; {nearest(str(value), known)}")
        if not self.ratios:
            raise ConfigError("ratios has none; give one of each layer")
        for layer, ratio in enumerate(self.ratios):
            if not 0 <= ratio <= 1:
                raise ConfigError(f"the ratio of layer {layer} is {ratio}; it lies in [0, 1]")
        if self.warmup < 0:
            raise ConfigError(f"warmup is {self.warmup}; it is 0 or more")
        if self.identifier == "proxy" and self.rank < 1:
            raise ConfigError(f"rank is {self.rank}; a proxy has 1 number or more")
        if self.proxies is None:
            return
        if self.identifier != "proxy":
            raise ConfigError(f"proxies are not read with identifier {self.identifier!r}; leave them out")
        if self.proxies.shape[:-1] != (len(self.ratios), self.rank):
            raise ConfigError(
                f"proxies are {list(self.proxies.shape)}; of {len(self.ratios)} ratios and rank {self.rank} they are "
                f"[{len(self.ratios)}, {self.rank}, hidden size]"
            )

    @property
    def along(self) -> bool:
        """Whether a partial pass may have rows of which layers behind the first keep nothing."""
        return self._scores_from_prompt or self.first_layer == "all"

    @property
    def _scores_from_prompt(self) -> bool:
        """The prompt's last row, which scores the answer's first position, goes along; else it is kept as it was when
        the prompt was renewed (as in SPA-Cache, but for what its code does with Dream)."""
        return bool(self.shift) and (not self.together or self.scored == "all")

    def most_chosen(self, index: int, per_seat: int, most_new: int) -> int:
        """Most rows of a seat that a layer chooses of ``per_seat``, of which ``most_new`` are new at most."""
        ratio = self.ratios[index]
        new = most_new if self.force_new and ratio else 0
        return min(max(1, int(per_seat * ratio)) + new, per_seat)

    def planes(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        """What is kept of a position beside K and V: what the layer added to it or gave, and its identifier."""
        if len(self.ratios) != config.num_layers:
            raise ConfigError(f"ratios of {len(self.ratios)} layers, and the network has {config.num_layers}; one each")
        if self.proxies is not None and self.proxies.shape[-1] != config.hidden_size:
            raise ConfigError(
                f"proxies are of rows of {self.proxies.shape[-1]} numbers, and this network's have {config.hidden_size}"
            )
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

    def _must(self, canvas: Canvas, kinds: Kinds) -> Tensor:
        """bool [S, N]: positions that every layer computes."""
        renewed_SN = torch.where(self._answer(canvas), kinds.answer_S[:, None], kinds.prompt_S[:, None])
        return canvas.visible_SN() & renewed_SN

    def _answer(self, canvas: Canvas) -> Tensor:
        return canvas.pos_1N() >= canvas.prompt_S[:, None]

    def _optional(self, canvas: Canvas, kinds: Kinds) -> Tensor:
        """bool [S, N]: positions that layers choose from. Beside a refresh of the answer there are none, and the
        prompt is none beside one of its own."""
        answer_SN = self._answer(canvas)
        if self.scored == "all":
            answer_SN = answer_SN | ~kinds.prompt_S[:, None]
        return canvas.visible_SN() & answer_SN & ~kinds.answer_S[:, None]

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        """The answer, chosen from or not, and the prompt where it is renewed or chosen from."""
        kinds = self.kinds(canvas, limits)  # type: ignore[arg-type]
        prompt_S = kinds.prompt_S | ~kinds.answer_S if self.scored == "all" else kinds.prompt_S
        run_SN, scoring_S1 = self._answer(canvas) | prompt_S[:, None], canvas.prompt_S[:, None] - self.shift
        if self.first_layer == "all":
            run_SN = run_SN | (canvas.pos_1N() < scoring_S1)
        if self._scores_from_prompt:
            run_SN = run_SN | (canvas.pos_1N() >= scoring_S1)
        return canvas.visible_SN() & run_SN

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        whole = self.scored == "all" or self.first_layer == "all"
        return prompt + answer if whole else min(answer + self.shift, prompt + answer)

    def gate(
        self,
        canvas: Canvas,
        limits: Limits,
        plan: RowPlan,
        context: PagedContext,
        pool: PagePool,
        most_new: int | None,
    ) -> DriftGate:
        """How this pass goes through the layers."""
        if self.identifier == "proxy" and self.proxies is None:
            raise ConfigError("identifier 'proxy' needs proxies, and there are none; make them with `cache.proxy`")
        kinds = self.kinds(canvas, limits)  # type: ignore[arg-type]
        must_M = at_rows(self._must(canvas, kinds), plan)
        optional_M = at_rows(self._optional(canvas, kinds), plan)
        new_M = None
        if self.force_new:  # a guidance twin commits nothing itself
            new_M = at_rows(canvas.new_SN()[canvas.leader_or_self_S()], plan)
        first_S = canvas.prompt_S if self.scored == "answer" else torch.where(kinds.prompt_S, canvas.prompt_S, 0)
        count_LS = self.counts((canvas.end_S - first_S).clamp(min=0))
        return DriftGate(self, plan, context, pool, must_M, optional_M, new_M, count_LS, most_new)


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
        new_M: Tensor | None,
        count_LS: Tensor,
        most_new: int | None,
    ) -> None:
        """``must`` and ``optional`` bool [M] share no row, and padding is neither. ``new``: chosen if it may be, up to
        ``most_new`` of a seat in a plan of fixed shape."""
        self.policy, self.plan, self.context, self.pool = policy, plan, context, pool
        self.must_M, self.optional_M, self.new_M, self.count_LS = must_M, optional_M, new_M, count_LS
        self.most_new = most_new
        ends_S = plan.num_rows_S if plan.per_seat is None else torch.full_like(plan.num_rows_S, plan.per_seat)
        self.first_S = torch.nn.functional.pad(ends_S.cumsum(0), (1, 0))
        """int64 [S + 1]: rows of each seat, padding included, from one to the next."""
        self.chosen: list[Tensor] = []
        """bool [M] by layer."""

    @property
    def num_rows_S(self) -> Tensor:
        num_computed_M = torch.stack(self.chosen).sum(0)
        num_computed_S = torch.zeros_like(self.plan.num_rows_S).index_add_(0, self.plan.seat_M, num_computed_M)
        return rows_a_layer(num_computed_S, len(self.pool.k))

    @property
    def ran_M(self) -> Tensor:
        """bool [M]: rows that a layer behind the first computed. The first computes them all, and says nothing."""
        return torch.stack(self.chosen[1:] or self.chosen).any(0)

    def run(self, layer: Layer, x_MD: Tensor) -> Tensor:
        """The stream behind this layer."""
        index, context, absolute = layer.index, self.context, self.policy.reuse == "absolute"
        normed_MD = layer.attn_norm(x_MD)
        self._value_M: Tensor | None = None
        self._attended_MD: Tensor | None = None
        part = self._part(layer, normed_MD)
        seen_P = self._seen(layer, normed_MD, part)
        x_P = part.of(x_MD)
        middle_P, normed_P = layer.mlp_norm.add(x_P, seen_P)
        mlp_P = layer.mlp(normed_P)
        kept_P = middle_P + mlp_P if absolute else seen_P + mlp_P
        plane_E = self.pool.planes["delta"][index]
        plane_E.index_copy_(0, part.write_P, kept_P.to(plane_E.dtype))
        kept_M = plane_E[context.write_M].to(x_MD.dtype)
        return kept_M if absolute else x_MD + kept_M

    # --- which rows

    def _part(self, layer: Layer, normed_MD: Tensor) -> Part:
        """What this layer computes: the first one everything, since nothing before it says what drifted."""
        if layer.index == 0 and self.policy.first_layer != "chosen":
            self.chosen.append(self.plan.column_M < self.plan.row_SE.shape[1] - 1)  # no padding
            return self.context.whole
        chosen_M = self._choose(layer, normed_MD)
        self.chosen.append(chosen_M)
        per_seat = self.plan.per_seat
        if per_seat is None:
            return self.context.part(chosen_M.nonzero()[:, 0])
        most_new = per_seat if self.most_new is None else self.most_new
        return self.context.packed_part(chosen_M, self.policy.most_chosen(layer.index, per_seat, most_new))

    def _choose(self, layer: Layer, normed_MD: Tensor) -> Tensor:
        """bool [M]"""
        policy, index = self.policy, layer.index
        if policy.ratios[index] == 0:
            return self.must_M
        drift_M = self._renew(layer, normed_MD)
        seats = (self.plan.seat_M, self.first_S, self.count_LS[index])
        chosen_M = ops.furthest(drift_M, self.optional_M, *seats, self.must_M)
        if self.new_M is not None:
            chosen_M = chosen_M | (self.new_M & self.optional_M)
        if policy.keep_chosen_only and self._seen_M is not None:
            self._keep(index, self._seen_M, chosen_M)
        return chosen_M

    @cached_property
    def _run_M(self) -> Tensor:
        """bool [M]: rows of which something is kept; others are along because they are scored."""
        return self.must_M | self.optional_M

    def _renew(self, layer: Layer, normed_MD: Tensor) -> Tensor:
        """Drift of each row, 1 - cosine, from what is kept of it; what is kept is then this pass's."""
        index, write_M = layer.index, self.context.write_M
        self._seen_M: Tensor | None = None
        if self.policy.identifier == "value":  # V itself is what is kept, and is renewed where it is projected
            self._value_M = layer.attn.values(normed_MD)
            return ops.drift(self._value_M, self.pool.v[index].flatten(1), write_M)
        seen_M = self._identify(layer, normed_MD)
        if self.policy.keep_chosen_only:
            self._seen_M = seen_M
        kept_M = None if self.policy.keep_chosen_only else self._run_M
        return ops.drift(seen_M, self.pool.planes["identifier"][index], write_M, kept_M)

    def _keep(self, index: int, seen_M: Tensor, where_M: Tensor) -> None:
        plane_E = self.pool.planes["identifier"][index]
        plane_E.index_copy_(0, torch.where(where_M, self.context.write_M, 0), seen_M.to(plane_E.dtype))

    def _identify(self, layer: Layer, normed_MD: Tensor) -> Tensor:
        if self.policy.proxies is not None:
            proxy_rD = self.policy.proxies[layer.index]
            return normed_MD.to(proxy_rD.dtype) @ proxy_rD.T
        if self.policy.identifier == "attention":
            self._attended_MD = self._attend_all(layer, normed_MD)
            return self._attended_MD
        return normed_MD

    def _attend_all(self, layer: Layer, normed_MD: Tensor) -> Tensor:
        """Attention output of all rows. Of those that may be chosen it sees what is written whether or not they are."""
        attn, context, writes = layer.attn, self.context, self.policy.writes
        if writes == "dense":
            q_M = self._project_run(layer, normed_MD)
        else:
            q_M = context.project_at(layer.index, normed_MD, attn, self._every(self._write_must_M))
            if writes == "values":
                self._write_values(layer, normed_MD)
        out_MD: Tensor = attn.out(context.attend_at(layer.index, q_M, context.whole))
        return out_MD

    # --- attention

    def _seen(self, layer: Layer, normed_MD: Tensor, part: Part) -> Tensor:
        """Attention output of the part's rows; K and V go to the pool as the policy says."""
        if self._attended_MD is not None and self.policy.writes == "dense":  # nothing was written since
            return part.of(self._attended_MD)
        q_P = self._project(layer, normed_MD, part)
        out_PD: Tensor = layer.attn.out(self.context.attend_at(layer.index, q_P, part))
        return out_PD

    def _project(self, layer: Layer, normed_MD: Tensor, part: Part) -> Tensor:
        """Rotated queries."""
        if part.rows_P is None:  # all are computed
            return self.context.project(layer.index, normed_MD, layer.attn)
        # Where nothing is chosen nothing is renewed: the layer is left as it is.
        writes = self.policy.writes if self.policy.ratios[layer.index] > 0 else "sparse"
        if writes == "dense":
            return part.of(self._project_run(layer, normed_MD))
        q_P = self.context.project_at(layer.index, normed_MD, layer.attn, part)
        if writes == "values" and self._attended_MD is None:  # else they were written before
            self._write_values(layer, normed_MD)
        return q_P

    def _project_run(self, layer: Layer, normed_MD: Tensor) -> Tensor:
        """Rotated queries of all rows, and K and V of those of which something is kept."""
        if not self.policy.along:
            return self.context.project(layer.index, normed_MD, layer.attn)
        return self.context.project_at(layer.index, normed_MD, layer.attn, self._every(self._write_run_M))

    def _every(self, write_M: Tensor) -> Part:
        """All rows, some of which write nothing."""
        return Part(None, write_M, self.context.sight)

    def _write_values(self, layer: Layer, normed_MD: Tensor) -> None:
        value_M, v_E = self._value_M, self.pool.v[layer.index]
        if value_M is None:
            value_M = layer.attn.values(normed_MD)
        v_E.index_copy_(0, self._write_run_M, value_M.unflatten(1, v_E.shape[1:]).to(v_E.dtype))

    @cached_property
    def _write_run_M(self) -> Tensor:
        """int64 [M]: pool entries of all rows of which something is kept, else 0."""
        return torch.where(self._run_M, self.context.write_M, 0)

    @cached_property
    def _write_must_M(self) -> Tensor:
        """int64 [M]: those of the rows that must run."""
        return torch.where(self.must_M, self.context.write_M, 0)
