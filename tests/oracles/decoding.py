"""Decoding of ONE request in plain Python loops: the oracle that the engine is compared with.

Written from the published descriptions of LLaDA, Dream, Fast-dLLM and the entropy-bounded sampler, and from nothing of
the engine: it has no batch, no cache, no state but a list of token ids, and it runs the network on the whole visible
canvas in every pass. `tests/oracles/test_decoding.py` holds it against outputs of the reference implementations.

A network is any function from a canvas (token ids) to raw logits [N, V], so a scripted one works too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unmask.config import SamplingParams
from unmask.models.attention import DenseContext
from unmask.models.transformer import Transformer

Network = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Family:
    """What the decoder must know about a model."""

    mask_id: int
    eos_ids: tuple[int, ...]
    shift: int = 0
    """1 for Dream: position p is predicted by row p - 1 (position 0 by its own row)."""
    never: tuple[int, ...] = ()
    """Ids beside MASK that are never predicted, though they count in the softmax."""


@dataclass(frozen=True)
class Commit:
    """A token became final: `position` counts from the answer's start (infilling: the text's), `num_pass` from 1."""

    position: int
    token_id: int
    num_pass: int
    probability: float


@dataclass
class Run:
    """What one request gave."""

    token_ids: list[int] = field(default_factory=list)
    num_passes: int = 0
    num_rows: int = 0
    commits: list[Commit] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: int | None = None
    margin: float = math.inf
    """Smallest distance of any decision to the other way: rounding below it cannot change the run."""


@dataclass(frozen=True)
class Prediction:
    """What one candidate would become."""

    position: int
    row: int
    """The output row that speaks for it: two positions may share one (position 0 under a shift)."""
    token_id: int
    probability: float
    lead: float
    """p1 - p2."""
    neg_entropy: float
    gap: float
    """How close the token was to being another: its lead in probability, and the filters' distances."""


def network_of(model: Transformer) -> Network:
    """The raw logits of `model` on a whole canvas."""

    @torch.inference_mode()
    def logits(canvas: Sequence[int]) -> Tensor:
        token = torch.tensor([list(canvas)])
        context = DenseContext(torch.arange(len(canvas)), rope=model.rope)
        return model.logits(model(token, context))[0]

    return logits


def family_of(model: Transformer) -> Family:
    """The facts that the oracle needs, from the model's config."""
    config = model.config
    return Family(config.mask_token_id, tuple(config.eos_token_ids), config.logit_shift)


# --- schedules


def blocks_of(start: int, stop: int, block_length: int | None) -> list[range]:
    """The answer [start, stop) cut from its start; the last block may be shorter; 0 or None: one block."""
    size = block_length or max(1, stop - start)
    return [range(first, min(first + size, stop)) for first in range(start, stop, size)]


def spread(total: int, parts: int) -> list[int]:
    """`total` in `parts` shares, the first ones larger by one.

    >>> spread(7, 3)
    [3, 2, 2]
    """
    return [total // parts + (1 if part < total % parts else 0) for part in range(parts)]


def dream_curve(masks: int, steps: int, eps: float) -> list[int]:
    """Dream's commits per step: int(m (1 - t[i+1] / t[i])) of the masks then left, all of them in the last step.

    >>> dream_curve(6, 3, 1e-3)
    [1, 2, 3]
    """
    times = torch.linspace(1, eps, steps + 1)
    out, left = [], masks
    for step in range(steps):
        share = torch.tensor(float(left)) * (1 - times[step + 1] / times[step])
        quota = int(share) if step < steps - 1 else left
        out.append(quota)
        left -= quota
    return out


def quotas(masks: Sequence[int], steps: int, eps: float | None) -> list[list[int]]:
    """For every block the commits of its passes; a step without a commit is no pass. `eps` given: Dream's curve."""
    out = []
    for block_masks, block_steps in zip(masks, spread(steps, len(masks)), strict=True):
        plan = spread(block_masks, block_steps) if eps is None else dream_curve(block_masks, block_steps, eps)
        out.append([quota for quota in plan if quota > 0])
    return out


# --- one position


def kept_ids(logits: Tensor, p: SamplingParams) -> tuple[Tensor, float]:
    """Which ids the filters keep, bool [V]: top_p, then top_k of what is left, then min_p; and how close that was."""
    weights = torch.softmax(logits / (p.temperature or 1.0), dim=-1)
    prob = weights.tolist()
    order = torch.argsort(weights, descending=True, stable=True).tolist()
    margin = math.inf
    if p.top_p < 1:
        chosen, before = [], 0.0
        for token in order:
            margin = min(margin, abs(before - p.top_p))
            if before > p.top_p:
                break
            chosen.append(token)
            before += prob[token]
        order = chosen
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.min_p > 0:
        floor = p.min_p * prob[order[0]]
        margin = min([margin, *(abs(prob[token] - floor) for token in order[1:])])
        order = [token for token in order if prob[token] >= floor]
    keep = torch.zeros_like(weights, dtype=torch.bool)
    keep[order] = True
    return keep & (weights > 0), margin


def predict(
    logits: Tensor,
    position: int,
    offset: int,
    family: Family,
    p: SamplingParams,
    infilling: bool,
    draw: Callable[[Tensor, int], int] | None,
) -> Prediction:
    """The token of one position (at `offset` in the answer) and its scores, from its raw logits [V]."""
    logits = logits.double().clone()
    gone = list(p.suppress_token_ids)
    if p.suppress_eos or infilling:
        gone += family.eos_ids
    if offset < p.min_tokens:
        gone += [*family.eos_ids, *p.stop_token_ids]
    logits[gone] = -math.inf
    keep, margin = kept_ids(logits, p)
    eligible = keep.clone()
    eligible[[family.mask_id, *family.never]] = False
    if p.temperature == 0:
        candidates = torch.where(eligible, logits, -math.inf)
        token = int(torch.nonzero(candidates == candidates.max())[0])  # the lowest id on a tie
    else:
        assert draw is not None, "sampling needs a draw"
        token = draw(torch.where(eligible, torch.softmax(logits / p.temperature, -1), 0.0), position)
    scored = logits / p.temperature if p.temper_confidence and p.temperature > 0 else logits.clone()
    if p.eos_confidence_last:
        scored[list(family.eos_ids)] = -math.inf
    prob = torch.softmax(torch.where(keep, scored, -math.inf), dim=-1)
    best = prob.topk(2).values
    others = torch.softmax(logits, -1)
    mine = float(others[token])
    others = torch.where(eligible, others, 0.0)
    others[token] = 0.0
    return Prediction(
        position=position,
        row=max(0, position - family.shift),
        token_id=token,
        probability=float(prob[token]),
        lead=float(best[0] - best[1]),
        neg_entropy=float(torch.special.xlogy(prob, prob).sum()),
        gap=min(margin, mine - float(others.max())) if p.temperature == 0 else math.inf,
    )


# --- which predictions become final


def score_of(prediction: Prediction, p: SamplingParams) -> float:
    """What positions are ranked by."""
    if p.entropy_bound is not None or p.alg == "entropy":
        return prediction.neg_entropy
    if p.alg == "topk_margin":
        return prediction.lead
    assert p.alg in (None, "maskgit_plus", "confidence_threshold_budget"), "this oracle does not draw orders"
    assert p.remasking in (None, "low_confidence"), "this oracle does not draw orders"
    return prediction.probability


def num_adaptive(ranked: Sequence[Prediction], p: SamplingParams) -> int | None:
    """How many of `ranked` a factor or an entropy bound accepts; None: neither is set."""
    if p.factor is not None:
        count = 1
        while count < len(ranked) and ranked[count].probability >= 1 - p.factor / (count + 2):
            count += 1
        return count
    if p.entropy_bound is not None:
        count, spent = 1, -ranked[0].neg_entropy
        while count < len(ranked) and spent <= p.entropy_bound:
            spent -= ranked[count].neg_entropy
            count += 1
        return count
    return None


def apart(first: Prediction, second: Prediction, p: SamplingParams) -> float:
    """How far two neighbours in rank are from changing places; certain or shared scores tie exactly everywhere."""
    high, low = score_of(first, p), score_of(second, p)
    exact = first.row == second.row or (high == low and high in (0.0, 1.0))
    return math.inf if exact else high - low


def bound_distances(ranked: Sequence[Prediction], p: SamplingParams) -> list[float]:
    """How far each comparison with a bound was from going the other way."""
    if p.threshold is not None:
        return [abs(r.probability - p.threshold) for r in ranked[1:]]
    if p.factor is not None:
        return [abs(r.probability - (1 - p.factor / (n + 2))) for n, r in enumerate(ranked) if n]
    if p.entropy_bound is not None:
        sums, spent = [], 0.0
        for r in ranked:
            spent -= r.neg_entropy
            sums.append(spent)
        return [abs(s - p.entropy_bound) for s in sums]
    return []


# --- the loop


def decode(
    network: Network,
    family: Family,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    curve: bool = False,
    draw: Callable[[Tensor, int, int], int] | None = None,
) -> Run:
    """The answer to `prompt`. `curve`: the schedule is Dream's. `draw(weights, position, num_pass)` samples."""
    assert params.max_tokens is not None
    canvas = [*prompt, *[family.mask_id] * params.max_tokens]
    return _run(network, family, canvas, len(prompt), params, curve, False, draw)


def infill(
    network: Network, family: Family, text: Sequence[int], params: SamplingParams, *, curve: bool = False
) -> Run:
    """`text` with its MASK ids replaced; everything else is pinned."""
    return _run(network, family, list(text), 0, params, curve, True, None)


def _logits(network: Network, canvas: list[int], start: int, family: Family, scale: float) -> Tensor:
    conditional = network(canvas).double()
    if scale == 0:
        return conditional
    masked = network([family.mask_id] * start + canvas[start:]).double()
    return masked + (scale + 1) * (conditional - masked)


def _run(
    network: Network,
    family: Family,
    canvas: list[int],
    start: int,
    p: SamplingParams,
    curve: bool,
    infilling: bool,
    draw: Callable[[Tensor, int, int], int] | None,
) -> Run:
    run, end = Run(), len(canvas)
    blocks = blocks_of(start, end, p.block_length)
    masks = [sum(canvas[i] == family.mask_id for i in block) for block in blocks]
    adaptive = p.threshold is not None or p.factor is not None or p.entropy_bound is not None
    budget = p.alg == "confidence_threshold_budget"
    steps = p.steps or sum(masks)
    plan = [] if adaptive and not budget else quotas(masks, steps, (p.eps or 1e-3) if curve and not budget else None)
    carry = 0
    stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(family.eos_ids))
    final: dict[int, Commit] = {}

    while any(canvas[i] == family.mask_id for i in range(start, end)):
        run.num_passes += 1
        run.num_rows += end * (2 if p.cfg_scale else 1)
        logits = _logits(network, canvas[:end], start, family, p.cfg_scale)
        number = next(n for n, block in enumerate(blocks) if any(canvas[i] == family.mask_id for i in block))
        undecided = [i for i in blocks[number] if i < end and canvas[i] == family.mask_id]
        if p.decode_window:
            undecided = undecided[: p.decode_window]
        num_pass = run.num_passes
        here = (lambda weights, i, n=num_pass: draw(weights, i, n)) if draw else None
        predictions = [
            predict(logits[max(0, i - family.shift)], i, i - start, family, p, infilling, here) for i in undecided
        ]
        ranked = sorted(predictions, key=lambda r: (-score_of(r, p), r.position))

        if budget:
            quota = min(len(ranked), carry + (plan[number].pop(0) if plan[number] else 0))
            chosen = [r for n, r in enumerate(ranked[:quota]) if n == 0 or r.probability >= (p.threshold or 0)]
            carry = quota - len(chosen)
        elif p.threshold is not None:
            quota = len(ranked)
            chosen = [r for n, r in enumerate(ranked) if n == 0 or r.probability >= p.threshold]
        else:
            quota = num_adaptive(ranked, p) or plan[number].pop(0)
            chosen = ranked[:quota]

        run.margin = min([run.margin, *(r.gap for r in predictions), *bound_distances(ranked, p)])
        cut = 1 if p.threshold is not None and not budget else quota
        if cut < len(ranked):
            run.margin = min(run.margin, apart(ranked[cut - 1], ranked[cut], p))
        if budget and len(ranked) > 1:
            run.margin = min(run.margin, apart(ranked[0], ranked[1], p))

        for r in chosen:
            canvas[r.position] = r.token_id
            final[r.position] = Commit(r.position - start, r.token_id, num_pass, r.probability)
            if r.token_id in stops and not infilling:
                end = min(end, r.position + 1)

    if end > start and canvas[end - 1] in stops and not infilling:
        run.finish_reason = "stop"
        run.stop_reason = canvas[end - 1] if canvas[end - 1] in p.stop_token_ids else None
        end -= 1
    run.token_ids = canvas[start:end]
    run.commits = [final[i] for i in sorted(final) if i < end]
    return run
