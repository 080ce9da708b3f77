"""From a row of the table of methods to the members that run it."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.cache.context import MassSpec
from unmask.cache.policy import BlockCausal, CachePolicy, Dual, Prefix, Recompute, Tracked
from unmask.decoding.drafter import Drafter, TwoPass
from unmask.decoding.frontier import Blocks, Frontier, Pipeline, Whole, Window
from unmask.methods import Method, leads
from unmask.models.config import ModelConfig


@dataclass(frozen=True)
class Axes:
    """One member of each axis that belongs to the engine; the rule is the same for all."""

    frontier: Frontier
    policy: CachePolicy
    drafter: Drafter

    @classmethod
    def of(cls, method: Method, config: ModelConfig) -> Axes:
        """The members of a row, for these weights."""
        return cls(_frontier(method, config), _policy(method, config), _drafter(method))


def _frontier(method: Method, config: ModelConfig) -> Frontier:
    members = {
        "whole": Whole,
        "blocks": lambda: Blocks(lead=leads(method, config.logit_shift)),
        "window": Window,
        "pipeline": Pipeline,
    }
    return members[method.frontier]()


def _policy(method: Method, config: ModelConfig) -> CachePolicy:
    def tracked() -> Tracked:
        first, last = method.option("mass_first_layer"), method.option("mass_last_layer")
        mass = MassSpec(first, last, softmax=method.option("mass") == "softmax")
        return Tracked(mass, refresh_rows=method.option("mass_rows") == "refresh", shift=config.logit_shift)

    members = {
        "recompute": Recompute,
        "prefix": Prefix,
        "dual": Dual,
        "tracked": tracked,
        "block-causal": BlockCausal,
    }
    return members[method.policy]()


def _drafter(method: Method) -> Drafter:
    if method.drafter == "none":
        return Drafter()
    return TwoPass(num_rows=method.option("verify_rows"), num_search=method.option("max_search"))
