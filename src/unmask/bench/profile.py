"""What a network's own decodes say about caches: how many rows each layer would have to recompute, whether short
proxies find them, and how much of the attention few decided positions hold.

L layers, P passes of requests
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.bench.profile_watch import GROUPS, IDENTIFIERS, PICKS, Watched, Watcher
from unmask.bench.results import Results
from unmask.cache.budget import BudgetCurve, fit
from unmask.cache.proxy import proxies
from unmask.config import SamplingParams
from unmask.engine.axes import Axes
from unmask.engine.llm import LLM
from unmask.engine.prompts import Prompt
from unmask.errors import ConfigError
from unmask.methods import METHODS
from unmask.models.config import ModelConfig
from unmask.models.transformer import Transformer

RULES = ("one", "threshold")
"""One token a pass, and all above a threshold."""
ONE = 2.0  # no prediction is that probable: a pass commits its best candidate only
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2)
RANKS = (1, 2, 4, 8, 16, 32, 64)
TOPS = (8, 16, 32, 64)
QUANTILES = (0.1, 0.5, 0.9, 0.99)
MOST = 0.9
"""Of the passes, this share needs no more rows than "most" says."""
OF = ("mean", "most")
"""What a curve is laid through: the rows that a pass needs on average, or that most passes do not exceed."""
FEWEST_LAYERS = 3
MOST_ROWS = 1 << 18  # of a pass: nobody waits for rows, and every row runs in every pass


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured.

    Raises:
        ConfigError: a value out of its range.
    """

    rules: Sequence[str] = RULES
    threshold: float = 0.95
    max_tokens: int = 128
    block_length: int | None = None
    """None takes what the checkpoint or the method recommends."""
    above: float = 0.05
    """A row whose vector has drifted further than this since the last pass must be recomputed."""
    rank: int = 128
    """Of the proxies whose drift is counted."""
    ratio: float = 0.25
    """Of an answer's rows, what proxies and values choose at the peak of SPA-Cache's budget for this network."""
    window: int = 16
    """Leftmost undecided positions whose attention is added up."""
    seats: int = 8

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule not in RULES:
                raise ConfigError(f"rule {rule!r} is unknown; known: {', '.join(RULES)}")
        for name, most in (("above", 2.0), ("ratio", 1.0)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it lies in (0, {most:g}]")
        for name in ("max_tokens", "rank", "window", "seats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is 1 or more")
        if not self.rules:
            raise ConfigError(f"no rule to decode by; known: {', '.join(RULES)}")

    def params(self, rule: str) -> SamplingParams:
        """What requests say."""
        threshold = ONE if rule == "one" else self.threshold
        return SamplingParams(threshold=threshold, max_tokens=self.max_tokens, block_length=self.block_length)

    def thresholds(self) -> list[float]:
        """Drifts that rows are held against."""
        return sorted({*THRESHOLDS, self.above})


def run(
    results: Results,
    network: Transformer,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    asked: Asked,
    *,
    checkpoint: Path | None = None,
    facts: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Decode all prompts by each rule, and write down what was seen. ``checkpoint`` is where the network comes from:
    some have a budget of their own by their name.

    Raises:
        ConfigError: the network was trained for another attention, or a request says what cannot be.
    """
    config = network.config
    full = min(config.num_kv_heads * config.head_dim, config.hidden_size)
    rank = min(asked.rank, full)
    ranks = sorted({*(each for each in RANKS if each < full), rank, full})
    whole_LrD = proxies(network, 1)

    def watcher() -> Watcher:
        return Watcher(
            network,
            whole_LrD,
            rank=rank,
            ranks=ranks,
            ratios=ratios(config, asked.ratio, checkpoint),
            above=asked.above,
            thresholds=asked.thresholds(),
            tops=TOPS,
            window=asked.window,
        )

    watched = Watched(network, watcher())
    seats = min(asked.seats, len(prompts))
    # Captured passes would not come by: the watcher must be called in each.
    llm = LLM(
        watched,
        method="confidence",
        tokenizer=tokenizer,
        enforce_eager=True,
        max_num_seqs=seats,
        max_num_batched_tokens=MOST_ROWS,
    )
    results.data |= {**(facts or {}), **_about(asked, config, ranks), "num_requests": len(prompts), "fits": []}
    for rule in asked.rules:
        watched.watcher = seen = watcher()
        seen.engine = llm.engine
        start = time.perf_counter()
        answers = [each.outputs[0] for each in llm.generate(list(prompts), asked.params(rule))]
        seconds, passes = time.perf_counter() - start, sum(each.num_forward_passes for each in answers)
        results.rows.extend(short({"rule": rule, **row}) for row in rows(seen, asked))
        results.data["fits"].extend(short({"rule": rule, **each}) for each in fits(seen, asked))
        results.data[f"passes_{rule}"] = passes
        tell(f"{rule}: {len(answers)} requests, {passes} passes of them, {seconds:.1f} s")
        results.write()


def _about(asked: Asked, config: ModelConfig, ranks: Sequence[int]) -> dict[str, Any]:
    about = {name: getattr(asked, name) for name in ("threshold", "max_tokens", "above", "ratio", "window", "seats")}
    sizes = {name: getattr(config, name) for name in ("family", "num_layers", "hidden_size", "num_heads")}
    return {**about, "block_length": asked.block_length, "ranks": list(ranks), "network": sizes, "rules": asked.rules}


def ratios(config: ModelConfig, ratio: float, checkpoint: Path | None = None) -> list[float]:
    """What spa-cache would recompute of an answer, by layer."""
    spa = METHODS["spa-cache"]
    method = replace(spa, options={**spa.options, "ratio": ratio})
    found: list[float] = Axes.of(method, config, checkpoint=checkpoint).policy.ratios  # type: ignore[attr-defined]
    return found


# Rows of the result file


def rows(watcher: Watcher, asked: Asked) -> Iterator[dict[str, Any]]:
    """Everything that was counted, by layer."""
    yield from _drift_rows(watcher, asked)
    yield from _attention_rows(watcher)
    yield from _agreement_rows(watcher)


def _drift_rows(watcher: Watcher, asked: Asked) -> Iterator[dict[str, Any]]:
    for name in IDENTIFIERS:
        drifts = watcher.drifts[name]
        count_LG = drifts.count_LG
        some_LG = count_LG.clamp(min=1)
        mean_LG = (drifts.total_LG / some_LG).tolist()
        above_LGT = (drifts.above_LGT / some_LG[..., None]).tolist()
        quantile = {share: drifts.quantile_LG(share).tolist() for share in QUANTILES}
        most_L = _quantile(watcher.told_LP(f"share {name}"), MOST)
        for layer, counts in enumerate(count_LG.tolist()):
            for g, (group, count) in enumerate(zip(GROUPS, counts)):
                if not count:
                    continue
                yield {
                    "part": "drift",
                    "identifier": name,
                    "group": group,
                    "layer": layer,
                    "num_rows": count,
                    "mean": mean_LG[layer][g],
                    "quantile": {f"{share:g}": quantile[share][layer][g] for share in QUANTILES},
                    "above": {f"{each:g}": above_LGT[layer][g][t] for t, each in enumerate(asked.thresholds())},
                    **({"most_above": most_L[layer]} if group == "answer" else {}),
                }


def _attention_rows(watcher: Watcher) -> Iterator[dict[str, Any]]:
    for top in watcher.tops:
        shares = {pick: watcher.told_LP(f"{pick} {top}") for pick in PICKS}
        # All three of the same passes, those in which there was a choice and a pass before.
        both_LP = torch.stack(list(shares.values())).isnan().any(0)
        shares = {pick: share_LP.masked_fill(both_LP, torch.nan) for pick, share_LP in shares.items()}
        decided_L, num_decided_L = (
            _mean(watcher.told_LP(name).masked_fill(both_LP, torch.nan)) for name in ("decided", "num_decided")
        )
        counted_L = (~both_LP).sum(1).tolist()
        for layer, count in enumerate(counted_L):
            if not count:
                continue
            yield {
                "part": "attention",
                "layer": layer,
                "top": top,
                **{pick: _mean(share_LP)[layer] for pick, share_LP in shares.items()},
                "own_low": _quantile(shares["own"], 1 - MOST)[layer],
                "all_decided": decided_L[layer],
                "num_decided": num_decided_L[layer],
                "num_passes": count,
            }


def _agreement_rows(watcher: Watcher) -> Iterator[dict[str, Any]]:
    chance_LP = watcher.told_LP("chance")
    num_passes_L = (~chance_LP.isnan()).sum(1).tolist()
    chance_L = _mean(chance_LP)
    for rank in watcher.ranks:
        overlap_L, covered_L = (_mean(watcher.told_LP(f"{what} {rank}")) for what in ("overlap", "covered"))
        for place, overlap in enumerate(overlap_L):
            if not num_passes_L[place]:
                continue
            layer = place + watcher.num_layers - len(overlap_L)  # what the first layer would choose is not asked
            yield {
                "part": "agreement",
                "layer": layer,
                "rank": rank,
                "overlap": overlap,
                "covered": covered_L[place],
                "chance": chance_L[place],
                "ratio": watcher.ratios[layer],
                "num_passes": num_passes_L[place],
            }


def short(value: Any) -> Any:
    """Six digits of every number; None for one that is none, which JSON cannot say."""
    if isinstance(value, dict):
        return {name: short(each) for name, each in value.items()}
    if isinstance(value, list):
        return [short(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _mean(value_LP: Tensor) -> list[float]:
    return value_LP.nanmean(1).tolist() if value_LP.shape[1] else [math.nan] * len(value_LP)


def _quantile(value_LP: Tensor, share: float) -> list[float]:
    return value_LP.nanquantile(share, dim=1).tolist() if value_LP.shape[1] else [math.nan] * len(value_LP)


# Budgets


def fits(watcher: Watcher, asked: Asked) -> Iterator[dict[str, Any]]:
    """The budget curve through the share of answer rows that drifted too far, by identifier."""
    at = asked.thresholds().index(asked.above)
    for name in IDENTIFIERS:
        count_L = watcher.drifts[name].count_LG[:, 0]
        if watcher.num_layers < FEWEST_LAYERS or not bool(count_L.all()):
            continue
        mean_L = (watcher.drifts[name].above_LGT[:, 0, at] / count_L).tolist()
        for of, share_L in zip(OF, (mean_L, _quantile(watcher.told_LP(f"share {name}"), MOST))):
            # No row in so many is less than one in them, and logarithms need a number.
            least = [0.5 / count for count in count_L.tolist()]
            yield {"identifier": name, "of": of, **fitted([max(pair) for pair in zip(share_L, least)])}


def fitted(share_L: Sequence[float]) -> dict[str, Any]:
    """The curve, how far the layers lie from it, and how far they would lie from the same share everywhere."""
    curve = rounded(fit(share_L))
    ratio_L = curve.ratios(len(share_L), min_ratio=0)
    flat = math.exp(sum(map(math.log, share_L)) / len(share_L))
    return {
        "mu": curve.mu,
        "rho_s": curve.rho_s,
        "rho_p": curve.rho_p,
        "rho_e": curve.rho_e,
        "share": list(share_L),
        "curve": ratio_L,
        "mean_share": sum(share_L) / len(share_L),
        "mean_curve": sum(ratio_L) / len(ratio_L),
        "residual": _log_error(share_L, ratio_L),
        "residual_flat": _log_error(share_L, [flat] * len(share_L)),
        "worst": max(abs(a - b) for a, b in zip(share_L, ratio_L)),
        "paste": paste(curve),
    }


def rounded(curve: BudgetCurve) -> BudgetCurve:
    """With the digits that are printed."""
    return BudgetCurve(*(float(f"{each:.4g}") for each in (curve.mu, curve.rho_s, curve.rho_p, curve.rho_e)))


def _log_error(share_L: Sequence[float], ratio_L: Sequence[float]) -> float:
    """Root mean square of the logarithms' differences: 0.1 is about 10%."""
    squares = [math.log(a / b) ** 2 for a, b in zip(share_L, ratio_L)]
    return math.sqrt(sum(squares) / len(squares))


def paste(curve: BudgetCurve) -> str:
    """What a row of policy "drift" says for this budget, as Python."""
    numbers = ", ".join(f"{getattr(curve, name):g}" for name in ("mu", "rho_s", "rho_p", "rho_e"))
    return f'{{"curve": ({numbers}), "ratio": {curve.rho_p:g}}}'
