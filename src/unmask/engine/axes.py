"""From a row of the table of methods to the members that run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.cache.budget import BudgetCurve, published, uniform
from unmask.cache.context import MassSpec
from unmask.cache.delayed import Delayed
from unmask.cache.drift import Drift
from unmask.cache.elastic import Elastic
from unmask.cache.policy import BlockCausal, CachePolicy, Dual, Prefix, Recompute, Tracked
from unmask.cache.proxy import load_or_compute
from unmask.decoding.drafter import Drafter, Nested, TwoPass
from unmask.decoding.frontier import Blocks, BlockWindow, Frontier, Pipeline, Whole, Window
from unmask.decoding.one_pass import OnePass
from unmask.engine.order import RandomOrder
from unmask.errors import ConfigError
from unmask.methods import Method, leads
from unmask.models.config import ModelConfig

PUBLISHED_FOR = {("llada", 32): "LLaDA-8B-Instruct", ("dream", 28): "Dream-v0-Instruct-7B"}
"""Family and layers to the name under which SPA-Cache published a curve."""


@dataclass(frozen=True)
class Axes:
    """One member of each axis that belongs to the engine; the rule is the same for all."""

    frontier: Frontier
    policy: CachePolicy
    drafter: Drafter

    @property
    def rows_beside(self) -> int:
        """Most scratch rows of a seat beside those of the canvas: none of a drafter that only has a pass of its own."""
        return 0 if type(self.drafter).scratch is Drafter.scratch else self.drafter.num_scratch

    @classmethod
    def of(cls, method: Method, config: ModelConfig, model: Any = None, checkpoint: Path | None = None) -> Axes:
        """The members of a row, for these weights; objects as they are. A member that looks at weights needs the
        ``model`` itself to run; its sizes are known without. What it works out of them is kept below the directory
        ``checkpoint``, if there is one."""
        return cls(_frontier(method, config), _policy(method, config, model, checkpoint), _drafter(method))


def _frontier(method: Method, config: ModelConfig) -> Frontier:
    if not isinstance(method.frontier, str):
        own: Frontier = method.frontier
        return own
    members = {
        "whole": Whole,
        "blocks": lambda: Blocks(lead=leads(method, config.logit_shift)),
        "window": Window,
        "block-window": BlockWindow,
        "pipeline": Pipeline,
    }
    return members[method.frontier]()


def _policy(method: Method, config: ModelConfig, model: Any, checkpoint: Path | None) -> CachePolicy:
    if not isinstance(method.policy, str):
        own: CachePolicy = method.policy
        return own

    def tracked() -> Tracked:
        first, last = method.option("mass_first_layer"), method.option("mass_last_layer")
        mass = MassSpec(first, last, softmax=method.option("mass") == "softmax")
        return Tracked(mass, refresh_rows=method.option("mass_rows") == "refresh", shift=config.logit_shift)

    members = {
        "recompute": Recompute,
        "prefix": Prefix,
        "dual": Dual,
        "tracked": tracked,
        "delayed": lambda: Delayed(
            variant=method.option("variant"),
            shift_type=method.option("shift_type"),
            shift=config.logit_shift,
            window=method.option("window"),
            order=RandomOrder(drafted=method.kinds[2] != "none"),
        ),
        "block-causal": BlockCausal,
        "drift": lambda: _drift(method, config, model, checkpoint),
        "elastic": lambda: Elastic(
            cosine=method.option("cosine"),
            tested=method.option("tested"),
            redo=method.option("tripping") == "redo",
            all_masks=method.option("masks") == "all",
            run_new=method.option("run_new") == "yes",
        ),
    }
    return members[method.policy]()


def _drift(method: Method, config: ModelConfig, model: Any, checkpoint: Path | None) -> Drift:
    kv_size = config.num_kv_heads * config.head_dim
    rank = min(method.option("rank"), kv_size, config.hidden_size)
    wants_proxies = method.option("identifier") == "proxy" and model is not None
    return Drift(
        _ratios(method, config),
        identifier=method.option("identifier"),
        proxies=load_or_compute(model, rank, checkpoint).to(model.head.device) if wants_proxies else None,
        rank=rank,
        writes=method.option("writes"),
        together=method.option("refresh") == "together",
        warmup=method.option("warmup"),
        keep_chosen_only=method.option("kept") == "chosen",
        force_new=method.option("new_first") == "yes",
        shift=config.logit_shift,
    )


def _ratios(method: Method, config: ModelConfig) -> list[float]:
    """Of the answer's rows, by layer; a curve is scaled to the ratio at its peak."""
    ratio, num_layers, said = method.option("ratio"), config.num_layers, method.option("curve")
    if not isinstance(said, str):
        return BudgetCurve(*said).ratios(num_layers, max_ratio=ratio, min_ratio=0)
    curve = PUBLISHED_FOR.get((config.family, num_layers))
    if said == "uniform" or (said == "auto" and curve is None):
        return uniform(num_layers, ratio)
    if curve is None:
        raise ConfigError(
            f"method {method.name!r}: no curve is published for a {config.family} network of {num_layers} layers; use "
            "curve='uniform'"
        )
    return published(curve).ratios(num_layers, max_ratio=ratio)


def _drafter(method: Method) -> Drafter:
    if not isinstance(method.drafter, str):
        own: Drafter = method.drafter
        return own
    if method.drafter == "none":
        return Drafter()
    if method.drafter == "nested":
        return Nested(method.option("num_drafts"), method.option("block_width"))
    if method.drafter == "one-pass":
        return OnePass(method.option("max_search"))
    return TwoPass(num_rows=method.option("verify_rows"), num_search=method.option("max_search"))
