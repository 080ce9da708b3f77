"""Held-out loss by mask kind and mask rate, and how well end-of-text is calibrated.

B rows, N positions, V vocabulary. Decoding commits what it is sure of: end-of-text far behind an answer is decided
first, from little evidence, so a model that is too sure of it cuts answers short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.train.config import NoiseConfig
from unmask.train.loss import cross_entropy
from unmask.train.masks import Noised, Rows, noise, reach

RATES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
CHUNK = 128
SURE = 0.9

Predict = Callable[[Tensor, Tensor], Tensor]
"""(token [B, N], see [B]) -> logits [B, N, V]."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of validation.csv: the masked positions of one mask kind at one rate."""

    masks: str
    """A mask kind; block means the noisy block, and tail what is behind it, all masked."""
    t: float
    positions: int
    ce: float
    accuracy: float
    content_ce: float
    """Over positions that are not end-of-text."""
    content_accuracy: float
    eos_probability: float
    """Mean predicted probability of end-of-text ..."""
    eos_frequency: float
    """... and how often it was."""
    eos_sure: float
    """Share of positions with p(end-of-text) > .9 ..."""
    eos_overconfident: float
    """... and the share of those that are something else."""


@torch.no_grad()
def validate(
    predict: Predict,
    groups: Sequence[Rows],
    kinds: Sequence[str],
    config: NoiseConfig,
    mask_id: int,
    eos_id: int,
    is_digit_V: Tensor | None = None,
) -> list[Record]:
    """Records for each kind and rate; the noise is the same at every call."""
    records: list[Record] = []
    for kind in kinds:
        for t in RATES if kind != "causal" else RATES[-1:]:
            sums = _measure(predict, groups, kind, t, config, mask_id, eos_id, is_digit_V)
            records += [_record(name, t, values) for name, values in sums.items()]
    return records


def mean_ce(records: Sequence[Record]) -> float:
    """Mean over mask kinds and rates: the loss, without its tails."""
    values = [r.ce for r in records if r.masks != "tail" and r.positions]
    return sum(values) / len(values) if values else float("nan")


def _measure(
    predict: Predict,
    groups: Sequence[Rows],
    kind: str,
    t: float,
    config: NoiseConfig,
    mask_id: int,
    eos_id: int,
    is_digit_V: Tensor | None,
) -> Mapping[str, list[float]]:
    """Sums over all rows, per place: the noisy part, and behind it."""
    device = groups[0].token_BN.device
    generator = torch.Generator(device=device).manual_seed(round(t * 1000))
    names = ("block", "tail") if kind == "block" else (kind,)
    sums = {name: torch.zeros(10, dtype=torch.float64, device=device) for name in names}
    for rows in (chunk for group in groups for chunk in _chunks(group)):
        rate_B = torch.full((len(rows.see_B),), t, device=device)
        noised = noise(rows, {kind: 1.0}, config, mask_id, generator, rate_B, is_digit_V=is_digit_V)
        logits = predict(noised.token_BN, reach(rows, {kind: 1.0}))
        for name, place_BN in zip(names, (noised.masked_BN & ~noised.tail_BN, noised.tail_BN)):
            sums[name] += _sums(logits, rows.token_BN, place_BN & _counted(noised), eos_id)
    return {name: values.tolist() for name, values in sums.items()}


def _counted(noised: Noised) -> Tensor:
    """Positions that the loss looks at, whatever their weight; a tail weight of 0 is measured all the same."""
    return (noised.weight_BN > 0) | noised.tail_BN


def _chunks(group: Rows) -> list[Rows]:
    return [Rows(*parts) for parts in zip(*(t.split(CHUNK) for t in group))]


def _sums(logits_BNV: Tensor, target_BN: Tensor, place_BN: Tensor, eos_id: int) -> Tensor:
    """[10] sums over the positions `place_BN`, in the order `_record` reads."""
    ce = cross_entropy(logits_BNV, target_BN)
    right = logits_BNV.argmax(-1) == target_BN
    p_eos = logits_BNV.float().softmax(-1)[..., eos_id]
    is_eos, sure = target_BN == eos_id, p_eos > SURE
    terms = [torch.ones_like(ce), ce, right, ~is_eos, ce * ~is_eos, right & ~is_eos]
    terms += [p_eos, is_eos, sure, sure & ~is_eos]
    return torch.stack([(term.double() * place_BN).sum() for term in terms])


def _record(name: str, t: float, sums: Sequence[float]) -> Record:
    n, ce, right, content, content_ce, content_right, p_eos, is_eos, sure, wrong = sums
    return Record(
        masks=name,
        t=t,
        positions=round(n),
        ce=ce / max(n, 1),
        accuracy=right / max(n, 1),
        content_ce=content_ce / max(content, 1),
        content_accuracy=content_right / max(content, 1),
        eos_probability=p_eos / max(n, 1),
        eos_frequency=is_eos / max(n, 1),
        eos_sure=sure / max(n, 1),
        eos_overconfident=wrong / max(sure, 1),
    )
