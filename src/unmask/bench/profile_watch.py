"""A decode seen from inside, pass by pass: how far rows drift in every layer, and what the undecided ones look at.

The engine runs as it always does; its network is `Watched`, whose attention context tells a `Watcher` what goes by. Of
the rows only those of the last pass are kept, everything else is counted at once.

M rows of a pass, m those that also ran in the pass before, L layers, S seats, N positions, W query rows of a seat, H
query heads, Hkv key heads, hd head size, D hidden size, r rows of a proxy, G groups of rows, T thresholds, B bins
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from unmask import ops
from unmask.cache.context import PagedContext
from unmask.core.canvas import Canvas
from unmask.core.rows import slots
from unmask.engine.engine import Engine
from unmask.models.attention import AttentionContext, AttentionWeights
from unmask.models.transformer import Transformer
from unmask.ops import cosine_drift

IDENTIFIERS = ("value", "proxy", "input", "attention")
"""Vectors whose drift is measured. The layer's input is the normed one, as the caches that choose rows compare it; the
attention output is what comes before the output projection."""
GROUPS = ("answer", "undecided", "prompt")
"""Of the rows of a request; the undecided ones are part of the answer."""
PICKS = ("own", "tracked", "random")
"""Decided positions whose attention is added up: each layer's own most looked at; those that Flash-Cache would track,
what the last pass committed and then by its sum of raw logits over all layers; and any."""
FIRST_TRACKED = 2  # the first layer that Flash-Cache's sum counts
LEAST, MOST, BINS = 1e-8, 2.0, 512  # drifts are counted in bins of equal ratio, 3.8% each; below the least is no drift


class Watched:
    """A network that the engine takes for the one inside, and whose passes ``watcher`` sees."""

    def __init__(self, network: Transformer, watcher: Watcher) -> None:
        self.network, self.watcher = network, watcher
        self.config, self.rope = network.config, network.rope

    @property
    def head(self) -> Tensor:
        """The scoring matrix [V, D]."""
        return self.network.head

    def __call__(self, token: Tensor, ctx: AttentionContext) -> Tensor:
        context = cast(PagedContext, ctx)
        self.watcher.begin(token, context)
        hidden_MD: Tensor = self.network(token, _Watching(context, self.watcher))
        self.watcher.end()
        return hidden_MD


class _Watching:
    """The engine's context, overheard."""

    gate = None  # without a cache every layer computes all rows

    def __init__(self, inner: PagedContext, watcher: Watcher) -> None:
        self._inner, self._watcher = inner, watcher

    def project(self, layer: int, hidden: ops.Rows, weights: AttentionWeights) -> Tensor:
        q = self._inner.project(layer, hidden, weights)
        assert isinstance(hidden, Tensor), "weights in 8 bits: profile them as they are"
        self._watcher.projected(layer, hidden, weights)
        return q

    def attend(self, layer: int, q: Tensor) -> Tensor:
        out = self._inner.attend(layer, q)
        self._watcher.attended(layer, q, out)
        return out


@dataclass(frozen=True)
class _Pass:
    """What is the same in every layer of a pass."""

    context: PagedContext
    canvas: Canvas
    row_SN: Tensor
    """Row of each position, -1 where it has none."""
    kept_m: Tensor
    before_m: Tensor
    """Rows that ran in the pass before, and which rows they were there."""
    seat_m: Tensor
    pos_m: Tensor
    group_Gm: Tensor
    """bool: whose row it is."""
    num_answer_S: Tensor
    """Answer rows that ran in both."""
    query_SW: Tensor
    """Rows whose attention is added up; the last one again where a seat has fewer."""
    asks_SW: Tensor
    """bool: the query is there."""


class Drifts:
    """The drifts of one identifier, counted by layer and group."""

    def __init__(self, num_layers: int, thresholds: Sequence[float], device: torch.device) -> None:
        size = (num_layers, len(GROUPS))
        self.bins_LGB = torch.zeros(*size, BINS, dtype=torch.int64, device=device)
        self.total_LG = torch.zeros(size, dtype=torch.float64, device=device)
        self.above_LGT = torch.zeros(*size, len(thresholds), dtype=torch.float64, device=device)
        self.thresholds_T = torch.tensor(thresholds, device=device)

    def add(self, layer: int, drift_m: Tensor, group_Gm: Tensor) -> None:
        """The drifts of one pass."""
        place_m = (drift_m.clamp(LEAST, MOST) / LEAST).log() * (BINS / math.log(MOST / LEAST))
        bin_Gm = place_m.long().clamp(max=BINS - 1).expand_as(group_Gm)
        self.bins_LGB[layer].scatter_add_(1, bin_Gm, group_Gm.long())
        share_Gm = group_Gm.double()
        self.total_LG[layer] += share_Gm @ drift_m.double()
        self.above_LGT[layer] += share_Gm @ (drift_m[:, None] > self.thresholds_T).double()

    @property
    def count_LG(self) -> Tensor:
        """Drifts that were counted."""
        return self.bins_LGB.sum(-1)

    def quantile_LG(self, share: float) -> Tensor:
        """The drift that this share of the rows does not exceed, to a bin; 0 where that is no drift at all, NaN without
        rows."""
        wanted_LG1 = (share * self.count_LG).ceil().clamp(min=1)[..., None]
        bin_LG = (self.bins_LGB.cumsum(-1) < wanted_LG1).sum(-1)
        middle_LG = LEAST * (MOST / LEAST) ** ((bin_LG.double() + 0.5) / BINS)
        return torch.where(bin_LG == 0, 0.0, middle_LG).masked_fill(self.count_LG == 0, torch.nan)


class Watcher:
    """Counts what the passes of an engine show. Set ``engine`` before the first of them.

    What is one number a layer, seat and pass is kept on a list for each name in ``told``: tensors [L, S], NaN where a
    seat has nothing to tell.
    """

    engine: Engine

    def __init__(
        self,
        network: Transformer,
        proxy_LrD: Tensor,
        *,
        rank: int,
        ranks: Sequence[int],
        ratios: Sequence[float],
        above: float,
        thresholds: Sequence[float],
        tops: Sequence[int],
        window: int,
        seed: int = 0,
    ) -> None:
        """``proxy`` has as many rows as the largest of ``ranks`` says; "proxy" drifts are those of ``rank``.

        ``ratios``: of the answer's rows, by layer, that proxies and values each choose. ``window``: leftmost undecided
        positions whose attention to the ``tops`` decided positions is added up.
        """
        self.proxy_LrD, self.rank, self.ranks, self.ratios = proxy_LrD, rank, list(ranks), list(ratios)
        self.above, self.tops, self.window = above, list(tops), window
        num_layers, device = network.config.num_layers, network.head.device
        self.num_layers, self.num_passes = num_layers, 0
        self.drifts = {name: Drifts(num_layers, thresholds, device) for name in IDENTIFIERS}
        self.told: dict[str, list[Tensor]] = {}
        self._this: dict[str, list[Tensor]] = {}
        self._random = torch.Generator(device).manual_seed(seed)
        self._last: dict[str, list[Tensor]] = {name: [] for name in IDENTIFIERS if name != "proxy"}
        """By layer, the rows of the last pass."""
        self._last_row_SN = torch.empty(0, 0, dtype=torch.int64, device=device)
        self._last_logits_SN: Tensor | None = None
        self.mass_LSN: Tensor | None = None
        """Where the queries of the last pass looked: each seat's sums to 1 in each layer."""

    # --- before the layers

    def begin(self, token_M: Tensor, context: PagedContext) -> None:
        """A pass starts."""
        canvas, plan = self.engine.canvas, context.plan
        row_SN = plan.row_SE[:, : canvas.capacity]
        before_SN = torch.where(canvas.pass_S[:, None] > 0, _resized(self._last_row_SN, row_SN.shape, -1), -1)
        before_M = before_SN[plan.seat_M, plan.column_M]
        kept_m = (before_M >= 0).nonzero()[:, 0]
        seat_m, pos_m = plan.seat_M[kept_m], plan.column_M[kept_m]
        answer_m = pos_m >= canvas.prompt_S[seat_m]
        group_Gm = torch.stack([answer_m, answer_m & (token_M[kept_m] == canvas.mask_token_id), ~answer_m])
        open_SW, _ = slots(canvas.undecided_SN(), self.window)
        asks_SW = open_SW < canvas.capacity
        self._now = _Pass(
            context=context,
            canvas=canvas,
            row_SN=row_SN,
            kept_m=kept_m,
            before_m=before_M[kept_m],
            seat_m=seat_m,
            pos_m=pos_m,
            group_Gm=group_Gm,
            num_answer_S=torch.zeros_like(canvas.rows_S).index_add(0, seat_m, answer_m.long()),
            query_SW=row_SN.gather(1, open_SW.clamp(max=canvas.capacity - 1)).clamp(min=0),
            asks_SW=asks_SW,
        )
        self._mass: list[Tensor] = []
        self._logits_SN = torch.zeros(row_SN.shape, device=row_SN.device)

    # --- in a layer

    def projected(self, layer: int, normed_MD: Tensor, weights: AttentionWeights) -> None:
        """Input and values of a layer."""
        now, first = self._now, self.num_passes == 0
        value_M = weights.values(normed_MD)
        if not first:
            value_m = self._drift("value", layer, value_M)
            self._drift("input", layer, normed_MD)
            wide = torch.promote_types(normed_MD.dtype, torch.float32)
            proxy_rD = self.proxy_LrD[layer].to(wide)
            new_mr = normed_MD[now.kept_m].to(wide) @ proxy_rD.T
            old_mr = self._last["input"][layer][now.before_m].to(wide) @ proxy_rD.T
            self._count("proxy", layer, cosine_drift(new_mr[:, : self.rank], old_mr[:, : self.rank]))
            if layer:  # the first one computes every row: nothing is chosen there
                self._compare(layer, value_m, new_mr, old_mr)
        self._keep("value", layer, value_M)
        self._keep("input", layer, normed_MD)

    def attended(self, layer: int, q_M: Tensor, out_M: Tensor) -> None:
        """Queries and attention output of a layer."""
        if self.num_passes:
            self._drift("attention", layer, out_M)
        self._keep("attention", layer, out_M)
        self._look(layer, q_M)

    def _keep(self, name: str, layer: int, rows_M: Tensor) -> None:
        kept = self._last[name]
        kept[layer : layer + 1] = [rows_M]

    def _drift(self, name: str, layer: int, rows_M: Tensor) -> Tensor:
        now = self._now
        drift_m = cosine_drift(rows_M[now.kept_m], self._last[name][layer][now.before_m])
        self._count(name, layer, drift_m)
        return drift_m

    def _count(self, name: str, layer: int, drift_m: Tensor) -> None:
        now = self._now
        self.drifts[name].add(layer, drift_m, now.group_Gm)
        over_m = (drift_m > self.above) & now.group_Gm[0]
        over_S = torch.zeros_like(now.num_answer_S).index_add(0, now.seat_m, over_m.long())
        self._tell(f"share {name}", over_S / now.num_answer_S)  # 0/0 is NaN: nothing to tell

    def _compare(self, layer: int, value_m: Tensor, new_mr: Tensor, old_mr: Tensor) -> None:
        """Which rows values would choose, and which each proxy would."""
        now, ratio = self._now, self.ratios[layer]
        count_S = (now.num_answer_S.double() * ratio).floor().clamp(min=1).long()
        asks_S = count_S < now.num_answer_S
        drift_SN = self._spread(value_m)
        # Rows that did not drift fill up the number by the noise of rounding: nobody has to find them.
        wanted_SN = furthest(drift_SN, count_S) & (drift_SN > LEAST)
        num_wanted_S, best_S = wanted_SN.sum(1), torch.where(wanted_SN, drift_SN, 0).sum(1)
        asks_S &= num_wanted_S > 0
        for rank in self.ranks:
            chosen_SN = furthest(self._spread(cosine_drift(new_mr[:, :rank], old_mr[:, :rank])), count_S)
            found_SN = torch.where(chosen_SN, drift_SN, 0)
            self._tell(f"overlap {rank}", torch.where(asks_S, (chosen_SN & wanted_SN).sum(1) / num_wanted_S, torch.nan))
            self._tell(f"covered {rank}", torch.where(asks_S, found_SN.sum(1) / best_S, torch.nan))
        self._tell("chance", torch.where(asks_S, count_S / now.num_answer_S, torch.nan))

    def _spread(self, value_m: Tensor) -> Tensor:
        """fp32 [S, N] of the answer's rows, -1 elsewhere: less than any drift."""
        now = self._now
        out_SN = torch.full(now.row_SN.shape, -1.0, device=value_m.device, dtype=value_m.dtype)
        out_SN[now.seat_m, now.pos_m] = torch.where(now.group_Gm[0], value_m, -1)
        return out_SN

    def _look(self, layer: int, q_M: Tensor) -> None:
        """Adds up where the window's queries look."""
        now = self._now
        k_MH = self.engine.pool.k[layer][now.context.write_M]
        mass_SN, logits_SN = attention_mass(q_M[now.query_SW], k_MH[now.row_SN.clamp(min=0)], self._seen(), now.asks_SW)
        self._mass.append(mass_SN)
        if layer >= FIRST_TRACKED:
            self._logits_SN += logits_SN

    def _seen(self) -> Tensor:
        """bool [S, W, N]: what the queries see."""
        now = self._now
        see_SW = now.context.plan.see_M[now.query_SW]
        return (now.canvas.pos_1N() < see_SW[:, :, None]) & (now.row_SN >= 0)[:, None]

    # --- after the layers

    def end(self) -> None:
        """The pass is over."""
        now = self._now
        self.mass_LSN = torch.stack(self._mass)
        self._add_up(self.mass_LSN)
        self._last_row_SN, self._last_logits_SN = now.row_SN, self._logits_SN
        for name, by_layer in self._this.items():
            self.told.setdefault(name, []).append(torch.stack(by_layer))
        self._this = {}
        self.num_passes += 1

    def _tell(self, name: str, value_S: Tensor) -> None:
        self._this.setdefault(name, []).append(value_S.double())

    def _add_up(self, mass_LSN: Tensor) -> None:
        """The attention that few decided positions hold, and all of them."""
        canvas, asks_S = self._now.canvas, self._now.asks_SW.any(1)
        decided_SN = canvas.final_SN & canvas.visible_SN()
        num_decided_S = decided_SN.sum(1)
        seconds_S = asks_S & (canvas.pass_S > 0)
        self._tell_all("decided", (mass_LSN * decided_SN).sum(-1), asks_S)
        self._tell_all("num_decided", num_decided_S.expand(self.num_layers, -1), asks_S)
        chance_SN = torch.rand(decided_SN.shape, generator=self._random, device=decided_SN.device)
        logits_SN = self._last_logits_SN if self._last_logits_SN is not None else self._logits_SN
        logits_SN = _resized(logits_SN, decided_SN.shape, 0).masked_fill(canvas.new_SN(), torch.inf)
        keys = {"own": mass_LSN, "tracked": logits_SN.expand_as(mass_LSN), "random": chance_SN.expand_as(mass_LSN)}
        for top in self.tops:
            most = min(top, canvas.capacity)
            for pick, key_LSN in keys.items():
                place_LSK = key_LSN.masked_fill(~decided_SN, -torch.inf).topk(most, dim=-1).indices
                # With no more decided positions than are picked, all picks are the same.
                tells_S = (seconds_S if pick == "tracked" else asks_S) & (num_decided_S > top)
                self._tell_all(f"{pick} {top}", mass_LSN.gather(-1, place_LSK).sum(-1), tells_S)

    def _tell_all(self, name: str, value_LS: Tensor, tells_S: Tensor) -> None:
        self._this[name] = list(torch.where(tells_S, value_LS.double(), torch.nan))

    # --- what came of it

    def told_LP(self, name: str) -> Tensor:
        """fp64 [L, P]: what was told under a name, by layer and the requests' passes, NaN where there was nothing to
        tell. Layers that never tell anything come first and are missing."""
        return torch.cat(self.told.get(name, [torch.zeros(self.num_layers, 0)]), 1).double().cpu()


def furthest(drift_SN: Tensor, count_S: Tensor) -> Tensor:
    """bool [S, N]: the ``count`` columns of each seat with the largest drift; ties to the leftmost."""
    num_seats, width = drift_SN.shape
    first_S = torch.arange(num_seats + 1, device=drift_SN.device) * width
    seat_M = torch.arange(num_seats, device=drift_SN.device).repeat_interleave(width)
    every_M = torch.ones_like(seat_M, dtype=torch.bool)
    return ops.furthest(drift_SN.flatten(), every_M, seat_M, first_S, count_S).view(drift_SN.shape)


def attention_mass(q_SW: Tensor, k_SN: Tensor, seen_SWN: Tensor, asks_SW: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [S, N], twice: the attention of a seat's queries [S, W, H, hd] to its keys [S, N, Hkv, hd], mean over heads
    and the queries that ask; and their raw logits in the same way. Zeros for a seat without a query."""
    num_kv_heads, head_dim = k_SN.shape[2:]
    q_SWH = q_SW.float().unflatten(2, (num_kv_heads, -1))
    logits = torch.einsum("swkgd,snkd->skgwn", q_SWH, k_SN.float()) / math.sqrt(head_dim)
    seen = seen_SWN[:, None, None]
    # A row that sees nothing would be 0/0; it is left out below.
    weights = logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1).mean((1, 2))
    asks_SW1 = (asks_SW & seen_SWN.any(-1))[:, :, None]
    num_S1 = asks_SW1.sum(1).clamp(min=1)
    raw_SWN = logits.mean((1, 2)).masked_fill(~seen_SWN, 0)
    return (weights * asks_SW1).sum(1) / num_S1, (raw_SWN * asks_SW1).sum(1) / num_S1


def _resized(value_SN: Tensor, shape: Sequence[int], filling: float) -> Tensor:
    """The same seats and positions on a canvas of another size."""
    out_SN = torch.full(tuple(shape), filling, dtype=value_SN.dtype, device=value_SN.device)
    num_seats, capacity = (min(pair) for pair in zip(shape, value_SN.shape))
    out_SN[:num_seats, :capacity] = value_SN[:num_seats, :capacity]
    return out_SN
