"""From a row of the table of methods to the members that run it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.cache.budget import PUBLISHED, BudgetCurve, published, uniform
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
from unmask.methods import OPTIONS, Method, leads
from unmask.models.config import ModelConfig, read_json

PUBLISHED_FOR = {("llada", 32): "LLaDA-8B-Instruct", ("dream", 28): "Dream-v0-Instruct-7B"}
"""Family and layers to the name under which SPA-Cache published a curve, for weights of another name. LLaDA-1.5 has the
shape of LLaDA-8B-Instruct and a curve of its own: only its name tells them apart."""


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

    @property
    def static(self) -> bool:
        """Whether ordinary passes have a fixed shape and can be captured; without, every pass is ragged."""
        return self.policy.static and self.drafter.static

    @classmethod
    def of(cls, method: Method, config: ModelConfig, model: Any = None, checkpoint: Path | None = None) -> Axes:
        """The members of a row, for these weights; objects as they are. A member that looks at weights needs the
        ``model`` itself to run; its sizes are known without. What it works out of them is kept below the directory
        ``checkpoint``, if there is one."""
        frontier, drafter = _frontier(method, config), _drafter(method, config)
        return cls(frontier, _policy(method, config, model, checkpoint), drafter)


def _frontier(method: Method, config: ModelConfig) -> Frontier:
    if not isinstance(method.frontier, str):
        own: Frontier = method.frontier
        return own
    members = {
        "whole": Whole,
        # Nested drafts hold a leading position's followers back themselves: they propose of them.
        "blocks": lambda: Blocks(lead=method.kinds[2] != "nested" and leads(method, config.logit_shift)),
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
    rank = _rank(method, config)
    wants_proxies = method.option("identifier") == "proxy" and model is not None
    return Drift(
        _ratios(method, config, checkpoint),
        identifier=method.option("identifier"),
        proxies=load_or_compute(model, rank, checkpoint).to(model.head.device) if wants_proxies else None,
        rank=rank,
        writes=method.option("writes"),
        together=method.option("refresh") == "together",
        warmup=method.option("warmup"),
        keep_chosen_only=method.option("kept") == "chosen",
        force_new=method.option("new_first") == "yes",
        reuse=method.option("reuse"),
        scored=method.option("scored"),
        first_layer=method.option("first_layer"),
        shift=config.logit_shift,
    )


def _rank(method: Method, config: ModelConfig) -> int:
    """Numbers of a proxy. The default is what LLaDA has, and all there are of a network with fewer."""
    most, said = min(config.num_kv_heads * config.head_dim, config.hidden_size), method.option("rank")
    if said <= 1:
        return max(1, int(said * most))
    if said > most and said != OPTIONS["drift"]["rank"]:
        raise ConfigError(
            f"method {method.name!r}: rank={said}, and the values of this network have {most} numbers; use at most "
            f"{most}, or a share of them: rank=1 is all"
        )
    return int(min(said, most))


def _ratios(method: Method, config: ModelConfig, checkpoint: Path | None) -> list[float]:
    """Of the answer's rows, by layer; a curve is scaled to the ratio at its peak, or to the mean over the layers."""
    said, peak, mean, least = (method.option(name) for name in ("curve", "ratio", "mean_ratio", "min_ratio"))
    if isinstance(said, str):
        curve = None if said == "uniform" else _published(config, checkpoint)
    else:
        curve, least = BudgetCurve(*said), least or 0
    if curve is None and said == "published":
        raise ConfigError(
            f"method {method.name!r}: no curve is published for a {config.family} network of {config.num_layers} "
            "layers; use curve='uniform'"
        )
    if curve is None:
        return uniform(config.num_layers, peak if mean is None else mean)
    return curve.ratios(
        config.num_layers,
        max_ratio=peak if mean is None else None,
        mean_ratio=mean,
        min_ratio=least,
        form=method.option("form"),
    )


def _published(config: ModelConfig, checkpoint: Path | None) -> BudgetCurve | None:
    """The curve of these weights, by their name, or by their shape where it says nothing."""
    by_name = {name.casefold(): name for name in PUBLISHED}
    known = [by_name[name] for name in _names(checkpoint) if name in by_name]
    name = known[0] if known else PUBLISHED_FOR.get((config.family, config.num_layers))
    return None if name is None else published(name)


def _names(checkpoint: Path | None) -> Iterator[str]:
    """What a checkpoint is called, in lower case: its directory, the hub's id if the hub's cache has it
    (models--OWNER--NAME/snapshots/REVISION), and what its config says that it was loaded from, which may be an
    ancestor."""
    if checkpoint is None:
        return
    folder = Path(os.path.abspath(checkpoint))
    yield folder.name.casefold()
    if folder.parent.name == "snapshots":
        yield folder.parent.parent.name.rpartition("--")[2].casefold()
    if (config := folder / "config.json").exists():
        yield str(read_json(config).get("_name_or_path", "")).rstrip("/").rpartition("/")[2].casefold()


def _drafter(method: Method, config: ModelConfig) -> Drafter:
    if not isinstance(method.drafter, str):
        own: Drafter = method.drafter
        return own
    if method.drafter == "none":
        return Drafter()
    if method.drafter == "nested":
        sizes = method.option("num_drafts"), method.option("block_width")
        return Nested(*sizes, ahead=method.kinds[1] == "prefix", shift=config.logit_shift)
    if method.drafter == "one-pass":
        return OnePass(method.option("max_search"), shift=config.logit_shift)
    return TwoPass(num_rows=method.option("verify_rows"), num_search=method.option("max_search"))
