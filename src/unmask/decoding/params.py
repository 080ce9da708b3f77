"""Requests' parameters as device tensors, one value per seat; the neutral value switches a part of the rule off.

S seats, T schedule steps, E ending ids, B banned ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import reduce
from operator import or_
from typing import TypeVar

import torch
from torch import Tensor

from unmask.config import MAX_BANNED_IDS, MAX_EOS_IDS, SamplingParams
from unmask.core.transfer import send
from unmask.decoding import schedule
from unmask.errors import ConfigError

PROB, MARGIN, ENTROPY, RANDOM = range(4)
_SCORE_KIND = {
    None: PROB,
    "maskgit_plus": PROB,
    "low_confidence": PROB,
    "confidence_threshold_budget": PROB,
    "origin": PROB,
    "topk_margin": MARGIN,
    "entropy": ENTROPY,
    "random": RANDOM,
}
T = TypeVar("T")
DEFAULT_EPS = 1e-3
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Needs:
    """Which parts of the rule some running request uses; the others cost nothing. Known on the host."""

    margin: bool = False
    entropy: bool = False
    random_rank: bool = False
    alg_temp: bool = False
    factor: bool = False
    entropy_bound: bool = False
    fill: bool = False
    sampled: bool = False
    filtered: bool = False
    guided: bool = False
    banned: bool = False
    stats_banned: bool = False
    min_tokens: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(Needs)})


@dataclass(frozen=True, kw_only=True)
class SeatParams:
    """One request's parameters in the rule's terms."""

    quota: Sequence[int]
    """Commits of each pass; empty: no cap."""
    fill: Sequence[float]
    """Chance of each candidate at each pass (Dream's `origin`); empty: none."""
    carries: bool
    """What a pass may commit and does not is added to the next pass's quota."""
    rescue: bool
    threshold: float
    factor: float
    entropy_bound: float
    score_kind: int
    window: int
    alg_temp: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    temper: bool
    guidance: float
    seed: int
    eos: tuple[int, ...]
    min_tokens: int
    ban_argmax: tuple[int, ...]
    """Ids that are never predicted."""
    ban_softmax: tuple[int, ...]
    """Ids whose probability is 0: they leave the softmax."""
    strict: bool = False
    """The threshold itself does not pass (D2F)."""
    tau_add: float = 0.1
    """Pipeline: a block is added once the last one is decided to this share."""
    tau_act: float = 0.95
    """Pipeline: a block is fully activated once its predecessor is decided to this share."""
    depth: int = NO_LIMIT
    """Pipeline: most blocks in flight."""
    drains: bool = False
    """Pipeline: an end of text does not move the canvas's end; blocks in flight are finished and no more are opened."""
    refresh: int = NO_LIMIT
    """Tracked: leftmost undecided positions that a pass recomputes."""
    track: int = NO_LIMIT
    """Tracked: decided positions that a pass recomputes. (The sum of two unlimited counts is no int32.)"""
    interval: int = 0
    answer_interval: int = 0
    """The answer alone is recomputed every so many passes; 0 never."""
    """Caches: the whole canvas is recomputed every so many of the request's passes; 0: never again."""
    drift_threshold: float = 0.0
    """Elastic: least similarity of a layer's attention for which the layers behind it are not recomputed."""
    search: int = NO_LIMIT
    """TwoPass: most positions under verification; the drafter has its own limit."""
    gamma: float = 0.8
    """TwoPass: least probability of a verified token, or least product of probabilities."""
    product: bool = False
    """TwoPass: accept by the running product; else by agreement."""
    isolated: bool = True
    """TwoPass: strict isolation; else the reference's."""

    @property
    def needs(self) -> Needs:
        return Needs(
            margin=self.score_kind == MARGIN,
            entropy=self.score_kind == ENTROPY or self.entropy_bound >= 0,
            random_rank=self.score_kind == RANDOM,
            alg_temp=self.alg_temp > 0,
            factor=self.factor > 0,
            entropy_bound=self.entropy_bound >= 0,
            fill=bool(self.fill),
            sampled=self.temperature > 0,
            filtered=self.top_p < 1 or self.top_k > 0 or self.min_p > 0,
            guided=self.guidance > 0,
            banned=bool(self.ban_argmax) or self.min_tokens > 0,
            stats_banned=bool(self.ban_softmax) or self.min_tokens > 0,
            min_tokens=self.min_tokens > 0,
        )


def _score_kind(p: SamplingParams) -> int:
    if p.alg is None and p.remasking is None and p.entropy_bound is not None:
        return ENTROPY
    return _SCORE_KIND[p.alg or p.remasking]


def _threshold(p: SamplingParams, scheduled: bool) -> float:
    """A pure schedule accepts whatever its cap allows."""
    if p.threshold is not None:
        return p.threshold
    return -torch.inf if scheduled and p.alg != "origin" else torch.inf


def _or(value: T | None, neutral: T) -> T:
    """What the request says, or the value that switches this part off."""
    return neutral if value is None else value


def _check_window(quota: Sequence[int], steps: int, p: SamplingParams) -> None:
    """A pass cannot commit more than the window holds, and a schedule does not come back to what it left out."""
    most = max(quota, default=0)
    if p.decode_window is not None and most > p.decode_window and p.alg != "confidence_threshold_budget":
        raise ConfigError(
            f"steps={steps} would commit {most} positions in one pass and decode_window={p.decode_window} holds "
            f"fewer; use more steps, or a decode_window of at least {most}"
        )


def seat_params(
    p: SamplingParams,
    *,
    kind: str,
    masks_per_block: Sequence[int],
    model_eos: tuple[int, ...],
    seed: int,
    lead: bool = False,
) -> SeatParams:
    """``p`` (completed by the method) in the rule's terms.

    ``kind`` is the method's schedule; ``masks_per_block`` the undecided positions of each block that has any; with
    ``lead`` the first pass of each block decides its first position only.

    Raises:
        ConfigError: the schedule has too few steps for the blocks or for the window, or chance for a leading position.
    """
    budget = p.alg == "confidence_threshold_budget"
    adaptive = p.threshold is not None or p.factor is not None or p.entropy_bound is not None
    scheduled = budget or not adaptive
    steps = p.steps or max(sum(masks_per_block), 2 * len(masks_per_block) if lead else 0)
    eps = DEFAULT_EPS if p.eps is None else p.eps
    origin = p.alg == "origin"
    counted = scheduled and not origin
    held = model_eos if p.suppress_eos else ()
    if origin and lead:
        raise ConfigError(
            "alg='origin' decides positions by chance, and here the first pass of a block must decide its first "
            "position (which is scored by the row before the block); use alg='maskgit_plus', or method='dream'"
        )
    quota = schedule.quotas(masks_per_block, steps, "even" if budget else kind, eps, lead) if counted else ()
    _check_window(quota, steps, p)
    return SeatParams(
        quota=quota,
        fill=schedule.fills(len(masks_per_block), steps, eps) if origin else (),
        carries=budget,
        rescue=not origin,
        threshold=_threshold(p, scheduled),
        factor=p.factor or 0.0,
        entropy_bound=-torch.inf if p.entropy_bound is None else p.entropy_bound,
        score_kind=_score_kind(p),
        window=_or(p.decode_window, NO_LIMIT),
        alg_temp=p.alg_temp,
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=max(p.top_k, 0),
        min_p=p.min_p,
        temper=p.temper_confidence,
        guidance=p.cfg_scale,
        seed=seed,
        eos=(() if p.ignore_eos else model_eos) + p.stop_token_ids,
        min_tokens=p.min_tokens,
        ban_argmax=p.suppress_token_ids + held,
        ban_softmax=p.suppress_token_ids + held + (model_eos if p.eos_confidence_last else ()),
        strict=p.strict_threshold is True,
        tau_add=_or(p.tau_add, SeatParams.tau_add),
        tau_act=_or(p.tau_act, SeatParams.tau_act),
        depth=_or(p.pipeline_depth, SeatParams.depth),
        drains=p.early_stop is False,
        refresh=_or(p.refresh_window, SeatParams.refresh),
        track=_or(p.track, SeatParams.track),
        interval=_or(p.refresh_interval, SeatParams.interval),
        answer_interval=_or(p.answer_interval, SeatParams.answer_interval),
        drift_threshold=_or(p.drift_threshold, SeatParams.drift_threshold),
        search=_or(p.search, SeatParams.search),
        gamma=_or(p.gamma, SeatParams.gamma),
        product=p.accept == "product",
        isolated=p.isolation != "reference",
    )


_REAL = (
    "tau_add",
    "tau_act",
    "gamma",
    "drift_threshold",
    "threshold",
    "factor",
    "entropy_bound",
    "alg_temp",
    "temperature",
    "top_p",
    "min_p",
    "guidance",
)
_WHOLE = (
    "score_kind",
    "window",
    "top_k",
    "min_tokens",
    "depth",
    "refresh",
    "track",
    "interval",
    "answer_interval",
    "search",
)
_SWITCH = ("carries", "rescue", "temper", "strict", "drains", "product", "isolated")


class DecodeParams:
    """Device tensors, written when a seat is taken."""

    threshold_S: Tensor
    factor_S: Tensor
    entropy_bound_S: Tensor
    alg_temp_S: Tensor
    temperature_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    guidance_S: Tensor
    score_kind_S: Tensor
    window_S: Tensor
    top_k_S: Tensor
    min_tokens_S: Tensor
    carries_S: Tensor
    rescue_S: Tensor
    temper_S: Tensor
    strict_S: Tensor
    tau_add_S: Tensor
    tau_act_S: Tensor
    depth_S: Tensor
    drains_S: Tensor
    refresh_S: Tensor
    track_S: Tensor
    interval_S: Tensor
    answer_interval_S: Tensor
    drift_threshold_S: Tensor
    search_S: Tensor
    gamma_S: Tensor
    product_S: Tensor
    isolated_S: Tensor

    def __init__(self, num_seats: int, num_steps: int, device: torch.device | str) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_seats, *shape, dtype=dtype, device=device)

        # By type in one tensor, whose rows have the names: a seat takes a copy a type, not a launch a name.
        self._kinds = tuple(
            (names, torch.zeros(len(names), num_seats, dtype=dtype, device=device))
            for names, dtype in ((_REAL, torch.float32), (_WHOLE, torch.int32), (_SWITCH, torch.bool))
        )
        for names, rows_KS in self._kinds:
            for name, row_S in zip(names, rows_KS.unbind()):
                setattr(self, f"{name}_S", row_S)
        self.capped_S = zeros(dtype=torch.bool)
        self.quota_ST = zeros(num_steps + 1, dtype=torch.int32)  # one more column: nothing is due past the last step
        self.fill_ST = zeros(num_steps + 1, dtype=torch.float32)
        self.seed_S = zeros(dtype=torch.int64)
        self.twin_S = zeros(dtype=torch.int64) - 1
        self.eos_SE = zeros(MAX_EOS_IDS, dtype=torch.int32) - 1
        self.ban_argmax_SB = zeros(MAX_BANNED_IDS + MAX_EOS_IDS, dtype=torch.int64) - 1
        self.ban_softmax_SB = zeros(MAX_BANNED_IDS + MAX_EOS_IDS, dtype=torch.int64) - 1
        self._filled: set[tuple[str, int]] = set()
        """Rows of the wide tables that hold something, by table and seat."""
        self._seat_needs: list[Needs] = [Needs()] * num_seats
        self._num_needing = Counter(self._seat_needs)
        self.needs = Needs()

    @property
    def num_seats(self) -> int:
        return len(self.seed_S)

    @property
    def num_steps(self) -> int:
        return self.quota_ST.shape[1] - 1

    @property
    def stops_SE(self) -> Tensor:
        """The ids that move a seat's end when they are committed: none for a seat that drains."""
        return self.eos_SE.masked_fill(self.drains_S[:, None], -1)

    def at_step(self, table_ST: Tensor, sched_S: Tensor) -> Tensor:
        """Entry of each seat's schedule at its place; past the end, the last column's neutral value."""
        return table_ST.gather(1, sched_S.long().clamp(max=self.num_steps)[:, None])[:, 0]

    def write(self, seat: int, p: SeatParams, twin: int = -1) -> None:
        """Give a seat its parameters; ``twin`` is the place of its guidance twin."""
        for names, rows_KS in self._kinds:
            send(rows_KS[:, seat], torch.tensor([getattr(p, name) for name in names], dtype=rows_KS.dtype))
        self.capped_S[seat].fill_(bool(p.quota))
        self.seed_S[seat].fill_(p.seed)
        self.twin_S[seat].fill_(twin)
        self._write_row("quota_ST", seat, p.quota, 0)
        self._write_row("fill_ST", seat, p.fill, 0)
        self._write_row("eos_SE", seat, p.eos, -1)
        self._write_row("ban_argmax_SB", seat, p.ban_argmax, -1)
        self._write_row("ban_softmax_SB", seat, p.ban_softmax, -1)
        self._need(seat, p.needs)

    def _write_row(self, name: str, seat: int, values: Sequence[float], neutral: float) -> None:
        """The values at the start of a table's row, the neutral value behind them; nothing where it is so already."""
        row = getattr(self, name)[seat]
        if len(values):
            rest = [neutral] * (len(row) - len(values))
            send(row, torch.tensor([*values, *rest], dtype=row.dtype))
            self._filled.add((name, seat))
        elif (name, seat) in self._filled:
            row.fill_(neutral)
            self._filled.discard((name, seat))

    def release(self, seat: int) -> None:
        """Switch everything off for a free seat."""
        self.twin_S[seat].fill_(-1)
        self._write_row("eos_SE", seat, (), -1)
        self._need(seat, Needs())

    def _need(self, seat: int, needs: Needs) -> None:
        self._num_needing[self._seat_needs[seat]] -= 1
        self._num_needing[needs] += 1
        self._seat_needs[seat] = needs
        self._num_needing = +self._num_needing  # without those that nobody has any more
        self.needs = reduce(or_, self._num_needing, Needs())

    def first(self, num_seats: int) -> DecodeParams:
        """The first seats' tables, the same tensors; `needs` stays as it is now."""
        out = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(out, name, value[:num_seats])
        return out

    def grown(self, num_seats: int, num_steps: int) -> DecodeParams:
        """Larger tables with the same seats in the same places."""
        larger = DecodeParams(num_seats, num_steps, self.seed_S.device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                getattr(larger, name)[tuple(slice(size) for size in value.shape)] = value
        larger._filled = set(self._filled)
        larger._seat_needs[: self.num_seats] = self._seat_needs
        larger._num_needing = Counter(larger._seat_needs)
        larger.needs = self.needs
        return larger
